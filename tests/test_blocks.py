"""The block pool: every block is free or held, counts match the tables, and nothing is handed out twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.blocks import BlockPool


def test_blocks_come_and_go() -> None:
    pool = BlockPool(4)
    assert (pool.num_free, pool.num_held) == (4, 0)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_held) == (0, 4)
    pool.check_integrity([first, second])
    pool.free(first)
    assert (pool.num_free, pool.num_held) == (3, 1)
    pool.check_integrity([second])
    pool.free(second)
    pool.check_integrity([])


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.free([b])
    pool.free([a])
    assert pool.allocate(2) == [a, b]
    assert c not in pool.allocate(1)


def test_a_pool_that_runs_dry_gives_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(IndexError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([held])
    assert pool.allocate(0) == []
    assert len(pool.allocate(1)) == 1


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match=f"block {block} is freed twice"):
        pool.free([block])
    pool.check_integrity([])


@pytest.mark.parametrize("tables", [[], [[0, 1], [1]], [[0]], [[0, 1, 2]]])
def test_integrity_sees_tables_that_differ(tables: list[list[int]]) -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2)) == [0, 1]
    pool.check_integrity([[0], [1]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity(tables)


@given(st.integers(0, 8), st.lists(st.one_of(st.integers(0, 8), st.tuples(st.integers(0, 20))), max_size=40))
def test_any_order_of_taking_and_giving_back(num_blocks: int, moves: list[int | tuple[int]]) -> None:
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    for move in moves:
        if isinstance(move, tuple):  # give back a table
            if tables:
                pool.free(tables.pop(move[0] % len(tables)))
        elif move > pool.num_free:
            with pytest.raises(IndexError):
                pool.allocate(move)
        else:
            tables.append(pool.allocate(move))
            assert len(tables[-1]) == move
        pool.check_integrity(tables)
        held = Counter(block for table in tables for block in table)
        assert all(count == 1 for count in held.values())
        assert pool.num_held == len(held)
        assert pool.num_held + pool.num_free == num_blocks
    for table in tables:
        pool.free(table)
    assert pool.num_free == num_blocks
