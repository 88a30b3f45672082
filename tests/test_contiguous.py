"""The baselines: regions that follow each other, split and joined, under the scheduler as it is."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.contiguous import KINDS, ContiguousTables, RegionPool
from pagedjax.request import Sequence
from pagedjax.scheduler import Scheduler


@given(st.integers(1, 70), st.lists(st.integers(0, 40), max_size=60))
def test_regions_never_overlap_and_join_again(num_blocks: int, moves: list[int]) -> None:
    pool = RegionPool(num_blocks)
    taken: list[range] = []
    for move in moves:
        if move == 0 and taken:
            pool.give_back(taken.pop(len(taken) // 2)[0])
        elif move and pool.has_room(move):
            region = pool.take(move)
            assert len(region) >= move > len(region) // 2
            assert region[0] % len(region) == 0
            taken.append(region)
        blocks = [block for region in taken for block in region]
        assert len(blocks) == len(set(blocks))
        pool.check_integrity([blocks])
    for region in taken:
        pool.give_back(region[0])
    pool.check_integrity([])
    assert pool.has_room(pool.largest_region)
    assert pool._regions == RegionPool(num_blocks)._regions


def test_what_is_reserved() -> None:
    def reserved(kind: str, prompt: int, output: int) -> int:
        return ContiguousTables(256, block_size=16, kind=kind, max_model_len=2048, chunk=512).reserved(prompt, output)

    assert reserved("max", 10, 25) == 2048
    assert reserved("pow2", 10, 25) == 10 + 32  # the paper's example
    assert reserved("pow2", 10, 32) == 10 + 32
    assert reserved("pow2", 2000, 33) == 2048
    assert reserved("oracle", 10, 25) == 35
    with pytest.raises(ValueError, match="kind must be one of max, pow2, oracle"):
        reserved("min", 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler_runs_over_reservations(kind: str) -> None:
    rng = random.Random(3)
    tables = ContiguousTables(75, block_size=4, kind=kind, max_model_len=64, chunk=16)
    scheduler = Scheduler(tables, max_num_seqs=8, token_budget=16)
    for index in range(60):
        prompt, output = rng.randrange(1, 40), rng.randrange(1, 24)
        sequences = [Sequence(str(index), i, [0] * prompt, prompt, output) for i in range(rng.choice([1, 1, 3]))]
        scheduler.add(*sequences)
    for _ in range(5000):
        plan = scheduler.schedule()
        assert not plan.preemptions
        assert not plan.copies
        tables.pool.check_integrity([s.block_tables[0] for s in scheduler.running])
        for sequence in scheduler.running:
            table = sequence.block_tables[0]
            assert table == list(range(table[0], table[0] + len(table)))
            assert len(table) * 4 >= tables.reserved(sequence.num_prompt, sequence.max_tokens)
        for share in plan:
            if share.samples:
                share.sequence.num_pending -= 1
                share.sequence.token_ids.append(0)
            if share.sequence.num_known_output == share.sequence.max_tokens:
                scheduler.finish(share.sequence)
        if not (scheduler.running or scheduler.waiting):
            break
    assert not (scheduler.running)
    assert not (scheduler.waiting)
    assert tables.pool.num_held == 0


def test_a_pool_without_a_region_that_large_refuses() -> None:
    tables = ContiguousTables(15, block_size=4, kind="max", max_model_len=64, chunk=16)
    with pytest.raises(ValueError, match="take 16 blocks, and there are 15"):
        Scheduler(tables, max_num_seqs=1, token_budget=4).add(Sequence("0", 0, [0], 1, 4))
