from pagedjax.drain_rate import DrainRate


def test_by_what_ended_in_the_last_minute() -> None:
    rate = DrainRate()
    rate.begin(100.0)
    assert rate.seconds_for(1, 100.0) == 0.0
    assert rate.seconds_for(1, 107.0) == 7.0, "none so far: as if one ended just now"
    for second in range(1, 11):
        rate.count(2, 100.0 + second)
    assert rate.seconds_for(1, 110.0) == 0.5
    assert rate.seconds_for(8, 110.0) == 4.0
    assert rate.seconds_for(1, 165.0) == 60 / 12, "those of the first five seconds are forgotten"
    assert rate.seconds_for(3, 300.0) == 180.0
    rate.begin(400.0)
    rate.count(1, 404.0)
    assert rate.seconds_for(2, 404.0) == 8.0
