"""The scheduler, one property at a time. `SimulatedEngine` stands in for engine and device and checks every plan;
``test_memory_machine`` moves it at random."""

from collections.abc import Callable
from typing import Any

import pytest
from simulated_engine import Job, SimulatedEngine

from pagedjax.block_keys import root_key
from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.request import Sequence, SequenceState
from pagedjax.scheduler import SchedulePlan, Scheduler
from pagedjax.swap_space import SwapSpace


def make(num_blocks: int = 40, block_size: int = 4, max_num_seqs: int = 4, token_budget: int = 8, **kind: Any) -> Any:
    return SimulatedEngine(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, token_budget=token_budget, **kind
    )


def add(engine: SimulatedEngine, prompt: list[int], max_tokens: int, **request: Any) -> Job:
    job = engine.add(prompt, max_tokens, **request)
    assert job is not None
    return job


def ones(count: int) -> list[int]:
    return [1] * count


def shares(plan: SchedulePlan) -> dict[str, int]:
    return {share.sequence.request_id: share.num_tokens for share in plan}


def finish(engine: SimulatedEngine) -> None:
    engine.drain()
    engine.check_idle()


def step(engine: SimulatedEngine) -> SchedulePlan:
    """Plan a step and commit it at once."""
    plan = engine.plan()
    while engine.in_flight:
        engine.commit()
    engine.check()
    return plan


def steps_until(engine: SimulatedEngine, happens: Callable[[SchedulePlan], bool]) -> list[SchedulePlan]:
    """The steps up to the one of which it is true."""
    plans = [step(engine)]
    while not happens(plans[-1]):
        assert len(plans) < 200, "it never happens"
        plans.append(step(engine))
    return plans


# ---- turn and budget ----


def test_prompts_go_in_chunks_and_decodes_keep_their_pace() -> None:
    engine = make(max_num_seqs=3)
    add(engine, ones(3), 30, shares=False)
    assert shares(engine.plan()) == {"1": 3}
    add(engine, ones(20), 5, shares=False)
    add(engine, ones(2), 5, shares=False)
    assert shares(engine.plan()) == {"1": 1, "2": 7}
    engine.commit()
    assert shares(engine.plan()) == {"1": 1, "2": 7}
    engine.commit()
    plan = engine.plan()
    assert shares(plan) == {"1": 1, "2": 6, "3": 1}
    assert [share.samples for share in plan] == [True, True, False]
    assert [len(part) for part in (plan.decodes, plan.prefills)] == [1, 2]
    engine.commit()
    finish(engine)


def test_every_running_sequence_needs_a_token_of_the_budget() -> None:
    with pytest.raises(ValueError, match="token_budget 3 is below max_num_seqs 4"):
        make(token_budget=3)


def test_sequences_are_queued_all_or_none() -> None:
    scheduler = Scheduler(BlockTables(BlockPool(2), block_size=4, chunk=4), max_num_seqs=1, token_budget=4)
    fits, too_long = Sequence("a", 0, [1, 2], 2, 6), Sequence("a", 1, [1, 2], 2, 7)
    with pytest.raises(ValueError, match=r"3 blocks.* 2$"):
        scheduler.add(fits, too_long)
    assert not scheduler.waiting
    scheduler.add(fits)
    assert list(scheduler.waiting) == [fits]


def test_what_needs_its_whole_history_is_refused_where_only_a_window_of_it_fits() -> None:
    engine = make(num_blocks=8, block_size=1, windows=(4,), token_budget=4)
    assert engine.add(ones(1), 8, keeps_history=True) is None
    add(engine, ones(1), 7, keeps_history=True)
    add(engine, ones(1), 40)
    finish(engine)


def test_nobody_overtakes_the_first_in_line() -> None:
    engine = make(num_blocks=4, max_num_seqs=3)
    add(engine, ones(9), 3, shares=False)
    add(engine, ones(8), 1, shares=False)
    add(engine, ones(1), 1, shares=False)
    assert shares(engine.plan()) == {"1": 8}
    assert shares(engine.plan()) == {"1": 1}, "the third would fit"
    engine.commit()
    finish(engine)


def test_a_pool_for_one_serves_any_number() -> None:
    engine = make(num_blocks=4, max_num_seqs=8)
    for number in range(200):
        add(engine, [number % 2] * (1 + number % 8), 16 - 1 - number % 8, shares=False)
    finish(engine)
    assert engine.num_preemptions > 0


def test_nobody_gives_way_to_tokens_of_later_steps() -> None:
    """A prompt goes on while the next chunk has room, though its rest has none until the other one ends."""
    engine = make(num_blocks=12, block_size=1, max_num_seqs=2, token_budget=2)
    add(engine, ones(1), 5, shares=False)
    add(engine, ones(9), 1, shares=False)
    least = 12
    while engine.jobs or engine.in_flight:
        engine.step()
        engine.check()
        for sequence in engine.scheduler.running:
            least = min(least, engine.pool.num_free - (sequence.num_prompt - sequence.num_computed))
    assert least < 0, "its rest had no room for a while"
    assert engine.num_preemptions == 0


# ---- the prefix cache ----


@pytest.mark.parametrize(
    ("num_prompt", "computed"), [(3, 3), (4, 1), (5, 1), (7, 3), (8, 1), (11, 3), (12, 1), (14, 2)]
)
def test_a_prompt_that_was_there_before(num_prompt: int, computed: int) -> None:
    """Full blocks of it are found. Where that is all of it, its last token is computed, and not written again."""
    engine = make(token_budget=16)
    add(engine, ones(14), 0)
    finish(engine)
    job = add(engine, ones(num_prompt), 3)
    (share,) = engine.plan()
    assert (share.num_tokens, share.samples) == (computed, True)
    assert share.first_write == num_prompt // 4 * 4
    assert job.sequences[0].num_cached == engine.hits == num_prompt - computed
    assert engine.queried == 14 + num_prompt
    finish(engine)
    assert engine.num_copies == 0


def test_prompts_are_shared_within_one_round() -> None:
    engine = make(token_budget=16)
    for _ in range(4):
        add(engine, ones(9), 2)
    plan = engine.plan()
    assert shares(plan) == {"1": 9, "2": 1, "3": 1, "4": 1}
    assert plan.hits == 3 * 8
    assert engine.pool.num_held == 2 + 4
    finish(engine)


def test_a_prompt_finds_what_another_computes_meanwhile() -> None:
    """Five alike; one that was preempted catches up with another. It finds what that one has decoded since, in the
    middle of catching up, and stays within the budget though it has but one token to compute now."""
    engine = make(num_blocks=57, block_size=1, max_num_seqs=4, token_budget=4, windows=(None, 3, 3))
    for _ in range(5):
        add(engine, ones(1), 18)
    step(engine)
    engine.end(engine.jobs[0])
    finish(engine)
    assert engine.num_found_later > 0


def test_a_prompt_under_way_fetches_nothing_from_the_swap_space() -> None:
    """That would go before the plan's copies, and might overwrite what one of them reads."""
    swap = SwapSpace(4)
    tables = BlockTables(BlockPool(8), block_size=4, chunk=4, swap=swap)
    scheduler = Scheduler(tables, max_num_seqs=1, token_budget=4)
    sequence = Sequence("1", 0, ones(12), 12, 1, root_key=root_key())
    scheduler.add(sequence)
    scheduler.schedule()
    tables.name_blocks(sequence, 2)
    swap.take(0, sequence.block_keys[1])
    assert tables.match(sequence).end == 2
    plan = scheduler.schedule()
    assert not plan.transfers
    assert [(share.start, share.num_tokens) for share in plan] == [(4, 4)]


def test_decoded_blocks_join_the_cache() -> None:
    engine = make(token_budget=32)
    add(engine, ones(5), 9)
    finish(engine)
    (turn,) = engine.ended
    assert len(turn) == 14
    job = add(engine, [*turn, 0, 0], 2)
    assert shares(engine.plan()) == {"2": 16 - 12}
    assert job.sequences[0].num_cached == 12
    finish(engine)


def test_salts_keep_requests_apart() -> None:
    engine = make(token_budget=32)
    for salt, hits in (("a", 0), ("b", 0), (None, 0), ("a", 8), (None, 8), ("", 0)):
        add(engine, ones(9), 1, salt=salt)
        before = engine.hits
        finish(engine)
        assert engine.hits - before == hits, salt


def test_who_may_not_read_the_cache_still_fills_it() -> None:
    engine = make(token_budget=32)
    for reads, hits in ((True, 0), (False, 0), (True, 8)):
        add(engine, ones(9), 1, reads_cache=reads)
        before = engine.hits
        finish(engine)
        assert engine.hits - before == hits


def test_a_pool_that_keeps_nothing() -> None:
    engine = make(keeps=False, token_budget=32)
    add(engine, ones(9), 1)
    add(engine, ones(9), 1)
    finish(engine)
    assert engine.hits == 8
    add(engine, ones(9), 1)
    finish(engine)
    assert engine.hits == 8


def test_what_is_computed_again_is_no_hit() -> None:
    engine = make(num_blocks=6, block_size=2, max_num_seqs=2, token_budget=8)
    add(engine, [0, 0], 8, salt="a")
    add(engine, [1, 1], 8, salt="b")
    finish(engine)
    assert engine.num_preemptions > 0
    assert engine.hits == 0
    assert engine.again > 0


# ---- fork and copy-on-write ----


def test_samples_compute_their_prompt_once() -> None:
    engine = make(token_budget=16)
    add(engine, ones(10), 4, n=4)
    assert [share.num_tokens for share in step(engine)] == [10]
    assert engine.pool.num_held == 3
    plan = step(engine)
    # The first goes on and writes; the others compute the prompt's last token for their own draw, and write nothing.
    assert [(share.start, share.first_write) for share in plan] == [(10, 10), (9, 10), (9, 10), (9, 10)]
    assert len(plan.copies) == 1
    plan = step(engine)
    assert len(plan.copies) == 2, "the last one writes in place"
    assert engine.pool.num_held == 2 + 4
    finish(engine)
    assert (engine.num_copies, engine.again) == (3, 0)


def test_samples_without_a_lane_find_the_prompt_later() -> None:
    engine = make(max_num_seqs=2, token_budget=16)
    add(engine, ones(10), 4, n=4)
    plans = steps_until(engine, lambda _: not engine.jobs)
    computed = sum(share.num_tokens for plan in plans for share in plan if share.start < 10)
    assert computed == 10 + 1 + 2 * 2


def test_whoever_is_left_computes_the_prompt() -> None:
    engine = make(token_budget=4)
    job = add(engine, ones(10), 2, n=3)
    step(engine)
    engine.scheduler.finish(job.sequences[0])
    del engine.job_of[job.sequences.pop(0)]
    assert engine.scheduler.num_waiting == 2
    assert [share.sequence.index for share in step(engine)] == [1]
    finish(engine)


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 3)])
@pytest.mark.parametrize("num_blocks", [14, 30])
def test_beams_fork_and_drop(windows: tuple[int | None, ...], num_blocks: int) -> None:
    engine = make(num_blocks=num_blocks * len(windows), block_size=2, windows=windows)
    for seed in range(10):
        assert engine.add_beams(ones(3), 6, 3, seed=seed) is not None
    finish(engine)
    assert engine.num_copies > 0


def test_beams_that_have_delivered_make_room_for_those_before_and_behind_them() -> None:
    """The third beam ranks last and has no block; the other two wait for it, and need none before it has run."""
    engine = make(num_blocks=3, block_size=3, max_num_seqs=3, token_budget=3)
    assert engine.add_beams([0], 2, 1) is not None
    assert engine.add_beams([0], 2, 3) is not None
    finish(engine)


def test_a_search_beyond_the_prompt_s_window_still_comes_to_its_end() -> None:
    """A beam that has lost its place finds nothing of what the others have left behind, and computes all of it."""
    for num_blocks in range(8, 30):
        engine = make(num_blocks=num_blocks, block_size=1, windows=(None, 2), max_num_seqs=3, token_budget=3)
        for seed in range(3):
            engine.add_beams([1, 0], 6, 3, seed=seed)
        finish(engine)


def test_a_prompt_without_output_is_left_in_peace() -> None:
    """It is computed and not committed; nobody takes it for a beam that stands in the way."""
    engine = make(max_num_seqs=1)
    add(engine, ones(3), 0, shares=False)
    add(engine, ones(3), 0, shares=False)
    finish(engine)
    assert engine.num_preemptions == 0


# ---- preemption ----


def test_the_cheapest_gives_way() -> None:
    """Both behind the first have what it needs; the one with less to compute again loses it."""
    engine = make(num_blocks=10, block_size=2, max_num_seqs=3, token_budget=16)
    for num_prompt in (4, 3, 5):
        add(engine, ones(num_prompt), 9, shares=False)
    (victim,) = steps_until(engine, lambda plan: bool(plan.preemptions))[-1].preemptions
    assert (victim.sequence.request_id, victim.num_lost, victim.mode) == ("2", 5, "recompute")
    assert [s.request_id for s in engine.scheduler.running] == ["1", "3"]
    finish(engine)


def test_what_others_keep_costs_nothing_to_bring_back() -> None:
    """The second has more tokens than the third, and shares most of them with the first."""
    engine = make(num_blocks=10, block_size=2, max_num_seqs=3, token_budget=32)
    add(engine, ones(8), 12)
    add(engine, [*ones(8), 0], 9)
    add(engine, [0] * 4, 9, shares=False)
    plans = steps_until(engine, lambda plan: bool(plan.preemptions))
    assert shares(plans[0]) == {"1": 8, "2": 1, "3": 4}
    (victim,) = plans[-1].preemptions
    assert (victim.sequence.request_id, victim.num_lost) == ("2", 3)
    finish(engine)


def test_swapped_out_and_in_again() -> None:
    engine = make(num_blocks=6, block_size=2, max_num_seqs=2, swap_slots=8, keeps=False)
    add(engine, [0, 0], 10, salt="a")
    add(engine, [1, 1], 10, salt="b")
    finish(engine)
    assert engine.num_swaps > 0
    # No more than what is behind the last full block is computed again.
    assert engine.again <= 2 * engine.num_preemptions


def test_a_full_swap_space_costs_work_and_nothing_else() -> None:
    again = []
    for slots in (0, 1, 8):
        engine = make(num_blocks=8, block_size=2, max_num_seqs=3, swap_slots=slots, keeps=False)
        for number in range(6):
            add(engine, [number % 2, number // 2 % 2, 0], 10, salt=str(number))
        finish(engine)
        again.append(engine.again)
    assert again[0] > again[1] > again[2]


def test_forked_groups_swap_what_they_share_once() -> None:
    engine = make(num_blocks=12, block_size=2, max_num_seqs=5, swap_slots=12, keeps=False)
    add(engine, [0, 0], 22, salt="a")
    add(engine, ones(9), 6, n=3, salt="b")
    finish(engine)
    assert engine.num_preemptions > 0
    assert engine.num_swaps > 0


def test_priority_comes_before_arrival() -> None:
    engine = make(num_blocks=4, max_num_seqs=2, by_priority=True)
    add(engine, ones(6), 6, shares=False, priority=1)
    step(engine)
    urgent = add(engine, ones(12), 2, shares=False, priority=-1)
    add(engine, ones(1), 2, shares=False, priority=0)
    plan = step(engine)
    assert [p.sequence.request_id for p in plan.preemptions] == ["1"]
    assert shares(plan) == {"2": 8}
    steps_until(engine, lambda _: urgent not in engine.jobs)
    assert set(shares(step(engine))) >= {"3"}
    finish(engine)


@pytest.mark.parametrize("token_budget", [3, 8])
def test_who_makes_way_waits_for_the_token_that_is_being_sampled(token_budget: int) -> None:
    """There would be room for it again at once, beside what it shares; but nobody can plan with that token yet."""
    engine = make(num_blocks=12, block_size=1, max_num_seqs=3, token_budget=token_budget, by_priority=True)
    add(engine, ones(1), 11)
    add(engine, ones(1), 11)
    for _ in range(4):
        engine.step()
    assert engine.add_beams([0], 1, 1, priority=-1) is not None
    plan = engine.plan()
    assert [p.sequence.request_id for p in plan.preemptions] == ["2"]
    assert set(shares(plan)) == {"1", "3"}
    engine.commit()
    finish(engine)


@pytest.mark.parametrize("max_num_seqs", [3, 4])
def test_a_search_finds_nothing_of_its_own_in_the_cache(max_num_seqs: int) -> None:
    """A beam that has to wait for a lane goes on from its parent's blocks; nobody had computed them before."""
    engine = make(block_size=2, max_num_seqs=max_num_seqs, token_budget=16)
    add(engine, ones(1), 20, shares=False)
    assert engine.add_beams([0, 1] * 4, 4, 3, seed=1) is not None
    finish(engine)
    assert engine.hits == 0


def test_priority_is_of_no_account_unless_asked_for() -> None:
    engine = make(num_blocks=4, max_num_seqs=1)
    add(engine, ones(6), 6, shares=False, priority=1)
    step(engine)
    add(engine, ones(12), 2, shares=False, priority=-1)
    assert shares(step(engine)) == {"1": 1}
    finish(engine)
    assert engine.num_preemptions == 0


def test_equal_priorities_do_not_push_each_other_out() -> None:
    engine = make(num_blocks=4, max_num_seqs=1, by_priority=True)
    add(engine, ones(6), 6, shares=False, priority=0)
    step(engine)
    add(engine, ones(1), 2, shares=False, priority=0)
    finish(engine)
    assert engine.num_preemptions == 0


# ---- leaving ----


def test_blocks_are_free_or_cached_at_once() -> None:
    engine = make(token_budget=16)
    job = add(engine, ones(10), 4)
    engine.plan()
    engine.end(job)
    assert (engine.pool.num_held, engine.pool.num_cached) == (0, 2)
    engine.check()
    finish(engine)


def test_what_a_fault_left_is_not_found() -> None:
    engine = make(token_budget=16)
    add(engine, ones(10), 1)
    finish(engine)
    add(engine, ones(10), 4)
    engine.plan()
    engine.fail_all()
    engine.check_idle()
    add(engine, ones(10), 1)
    finish(engine)
    assert engine.hits == 8, "those of the second, none of the third"


@pytest.mark.parametrize("place", ["waiting", "running", "fork"])
def test_finished_wherever_it_is(place: str) -> None:
    engine = make(max_num_seqs=1, token_budget=4)
    first, second = add(engine, ones(8), 2), add(engine, ones(8), 2, n=2)
    step(engine)
    job, index = {"running": (first, 0), "waiting": (second, 0), "fork": (second, 1)}[place]
    sequence = job.sequences[index]
    engine._finish(job, sequence)
    assert sequence.state is SequenceState.FINISHED
    engine.check()
    finish(engine)
