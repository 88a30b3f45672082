"""The block pool: every block is free, cached or held, counts match the tables, and nothing is handed out twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_engine import WatchedPool

from pagedjax.block_keys import next_key, root_key
from pagedjax.blocks import BlockName, BlockPool


def named(pool: BlockPool, key: str, group: int = 0, depth: int = 1) -> int:
    """A block that is held and has a name."""
    (block,) = pool.allocate(1)
    pool.register(block, BlockName(group, key, depth))
    return block


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
    pool.share(block)
    pool.free([block, block])
    with pytest.raises(ValueError, match=f"block {block} is freed twice"):
        pool.free([block])
    pool.check_integrity([])


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="block 0 is free and holds nothing to share"):
        pool.share(0)


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.free([block])
    assert (pool.num_free, pool.state(block)) == (0, "referenced")
    pool.free([block])
    assert (pool.num_free, pool.state(block)) == (1, "free")


def test_a_named_block_stays_and_is_found_again() -> None:
    pool = BlockPool(2)
    block = named(pool, "a")
    pool.free([block])
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.state(block)) == (2, 1, 0, "cached")
    assert pool.lookup(0, "a") == block
    pool.share(block)
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.state(block)) == (1, 0, 1, "referenced")
    pool.check_integrity([[block]])


def test_free_blocks_go_first_and_then_the_cached_one_released_first() -> None:
    pool = BlockPool(4)
    a, b, c = (named(pool, key) for key in "abc")
    pool.free([b, c, a])
    pool.share(b)
    pool.free([b])  # used again: now it is the last one
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [3]
    assert pool.num_evictions == 0
    assert pool.allocate(2) == [c, a]
    assert pool.num_evictions == 2
    assert [pool.lookup(0, key) for key in "abc"] == [None, b, None]


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = named(pool, "a"), named(pool, "a")
    assert pool.name(first) == BlockName(0, "a", 1)
    assert pool.name(second) is None
    pool.free([second, first])
    assert [pool.state(block) for block in (first, second)] == ["cached", "free"]
    pool.check_integrity([])


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(2, num_groups=2)
    first, second = named(pool, "a", group=0), named(pool, "a", group=1)
    assert (pool.lookup(0, "a"), pool.lookup(1, "a")) == (first, second)
    assert first != second


def test_a_pool_that_keeps_nothing_shares_among_those_that_run() -> None:
    pool = BlockPool(2, keeps=False)
    block = named(pool, "a")
    assert pool.lookup(0, "a") == block
    pool.free([block])
    assert (pool.num_cached, pool.lookup(0, "a"), pool.state(block)) == (0, None, "free")
    pool.check_integrity([])


def test_after_a_fault_nothing_is_found() -> None:
    pool = BlockPool(3)
    cached, held = named(pool, "a"), named(pool, "b")
    pool.free([cached])
    pool.forget_all()
    assert (pool.lookup(0, "a"), pool.lookup(0, "b")) == (None, None)
    assert [pool.state(block) for block in (cached, held)] == ["free", "referenced"]
    pool.check_integrity([[held]])
    pool.free([held])
    assert pool.state(held) == "free"
    assert pool.num_free == 3


@pytest.mark.parametrize("tables", [[], [[0, 1], [1]], [[0]], [[0, 1, 2]]])
def test_integrity_sees_tables_that_differ(tables: list[list[int]]) -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate(2)) == [0, 1]
    pool.check_integrity([[0], [1]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity(tables)


@given(
    st.integers(0, 8),
    st.booleans(),
    st.lists(
        st.one_of(
            st.integers(0, 4),  # take so many
            st.tuples(st.just("free"), st.integers(0, 20)),
            st.tuples(st.just("name"), st.integers(0, 20)),
            st.tuples(st.just("find"), st.integers(0, 20)),
        ),
        max_size=60,
    ),
)
def test_any_order_of_taking_naming_finding_and_giving_back(
    num_blocks: int, keeps: bool, moves: list[int | tuple[str, int]]
) -> None:
    """The watched pool knows who has to be evicted; a key's block is the one it was given to, or there is none."""
    pool = WatchedPool(num_blocks, keeps=keeps)
    tables: list[list[int]] = []
    given_to: dict[int, int] = {}
    for move in moves:
        if isinstance(move, int):
            if move > pool.num_free:
                with pytest.raises(IndexError):
                    pool.allocate(move)
            else:
                tables.append(pool.allocate(move))
        elif move[0] == "find":
            block = pool.lookup(0, move[1])
            if block is not None:
                assert given_to[move[1]] == block
                pool.share(block)
                tables.append([block])
        elif tables:
            table = tables[move[1] % len(tables)]
            if move[0] == "free":
                tables.remove(table)
                pool.free(table)
            elif table and pool.name(table[0]) is None:
                if pool.lookup(0, move[1]) is None:
                    given_to[move[1]] = table[0]
                pool.register(table[0], BlockName(0, move[1], 1))
        pool.check_integrity(tables)
        held = Counter(block for table in tables for block in table)
        assert pool.num_held == len(held)
        assert pool.num_held + pool.num_free == num_blocks
    for table in tables:
        pool.free(table)
    assert pool.num_free == num_blocks


def test_keys_name_tokens_and_all_before_them() -> None:
    root = root_key()
    assert next_key(root, [1, 2]) == next_key(root_key(None), [1, 2])
    different = [
        next_key(root, [1, 2]),
        next_key(root, [2, 1]),
        next_key(root, [1]),
        next_key(root, [1, 2, 0]),
        next_key(next_key(root, [1]), [2]),
        next_key(next_key(root, [0]), [2]),
        next_key(root_key("a"), [1, 2]),
        next_key(root_key(""), [1, 2]),
    ]
    assert len(set(different)) == len(different)
