"""Block tables by themselves: what a prompt finds, what a fork shares and copies, what a window and a swap leave."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.block_keys import root_key
from pagedjax.block_tables import BlockCopy, BlockTables, Match
from pagedjax.blocks import BlockName, BlockPool
from pagedjax.request import NO_BLOCK, Sequence
from pagedjax.swap_space import SwapSpace

SHARED = root_key()


def make(
    num_blocks: int = 20,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    swap_slots: int = 0,
    keeps: bool = True,
) -> BlockTables:
    return BlockTables(
        BlockPool(num_blocks, len(windows), keeps=keeps),
        block_size=block_size,
        windows=windows,
        chunk=100,
        swap=SwapSpace(swap_slots) if swap_slots else None,
    )


def sequence(tables: BlockTables, tokens: list[int], key: bytes | None = SHARED, **fields: Any) -> Sequence:
    made = Sequence("a", 0, list(tokens), len(tokens), 10, root_key=key, **fields)
    tables.release(made)
    return made


def compute(tables: BlockTables, of: Sequence, end: int) -> list[BlockCopy]:
    """As a step does that computes the tokens up to ``end``."""
    tables.slide(of)
    copies = tables.grow(of, end)
    of.num_computed, of.num_stored = end, max(end, of.num_stored)
    tables.register(of)
    return copies


def computed(tables: BlockTables, tokens: list[int], key: bytes | None = SHARED, **fields: Any) -> Sequence:
    made = sequence(tables, tokens, key, **fields)
    compute(tables, made, len(tokens))
    return made


def adopted(tables: BlockTables, made: Sequence) -> tuple[int, int]:
    """Tokens that a prompt need not compute, and tokens that it need not write."""
    tables.adopt(made, tables.match(made))
    return made.num_computed, made.num_stored


def found(tables: BlockTables, tokens: list[int]) -> tuple[int, int]:
    """The same of a prompt that comes and goes."""
    made = sequence(tables, tokens)
    counts = adopted(tables, made)
    tables.release(made)
    return counts


CHAIN = list(range(12))


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (CHAIN[:3], (0, 0)),
        (CHAIN[:4], (3, 4)),  # all of the prompt: the last token is computed, and not written
        (CHAIN[:5], (4, 4)),
        (CHAIN[:7], (4, 4)),
        ([*CHAIN[:7], 99], (4, 4)),  # a block that differs in its last token
        ([*CHAIN[:8], 99], (8, 8)),
        (CHAIN[:8], (7, 8)),
        (CHAIN, (11, 12)),
        ([*CHAIN, 99], (12, 12)),
        ([*CHAIN, 99, 99, 99, 99], (12, 12)),
        ([99, *CHAIN[1:]], (0, 0)),  # equal blocks behind a different one
    ],
)
def test_hits_of_every_length(is_running: bool, tokens: list[int], expected: tuple[int, int]) -> None:
    tables = make()
    before = computed(tables, CHAIN)
    if not is_running:
        tables.release(before)
    made = sequence(tables, tokens)
    assert adopted(tables, made) == expected
    assert len(made.block_tables[0]) == expected[1] // 4
    if is_running:
        assert made.block_tables[0] == before.block_tables[0][: expected[1] // 4]
    tables.pool.check_integrity([*before.block_tables, *made.block_tables])


def test_who_finds_nothing() -> None:
    tables = make()
    tables.release(computed(tables, CHAIN))
    for fields in ({"key": root_key("other")}, {"key": None}, {"reads_cache": False}):
        assert adopted(tables, sequence(tables, CHAIN, **fields)) == (0, 0), fields
    tables.release(computed(tables, CHAIN, key=root_key("other")))
    assert adopted(tables, sequence(tables, CHAIN, key=root_key("other"))) == (11, 12)


def test_without_a_key_nothing_is_left_behind() -> None:
    tables = make()
    tables.release(computed(tables, CHAIN, key=None))
    assert tables.pool.num_cached == 0


def test_a_pool_that_keeps_nothing_shares_with_those_that_run() -> None:
    tables = make(keeps=False)
    running = computed(tables, CHAIN)
    other = sequence(tables, CHAIN)
    assert adopted(tables, other) == (11, 12)
    tables.release(running)
    tables.release(other)
    assert found(tables, CHAIN) == (0, 0)


def test_decoded_blocks_are_found_by_a_chat_s_next_turn() -> None:
    tables = make()
    turn = computed(tables, CHAIN[:6])
    for token in (50, 51, 52):  # the last is known, and not computed
        turn.token_ids.append(token)
        if token != 52:
            compute(tables, turn, len(turn.token_ids))
    tables.release(turn)
    assert found(tables, [*CHAIN[:6], 50, 51, 52, 60]) == (8, 8)


def test_a_block_is_named_once_its_tokens_are_known() -> None:
    """A step in flight samples the token whose keys and values the next one writes: nobody can know them yet."""
    tables = make()
    running = computed(tables, CHAIN[:3])
    running.num_pending = 1
    compute(tables, running, 4)
    assert running.num_registered == 0
    running.num_pending = 0
    running.token_ids.append(3)
    tables.register(running)
    assert found(tables, CHAIN) == (4, 4)


def test_a_chain_goes_from_its_tail() -> None:
    tables = make(num_blocks=3)
    chain = computed(tables, CHAIN)
    a, b, c = chain.block_tables[0]
    tables.release(chain)
    assert tables.pool.allocate(1) == [c]
    assert found(tables, CHAIN) == (8, 8)
    assert tables.pool.allocate(2) == [b, a]


def test_a_prefix_in_use_outlives_a_chain_that_is_not() -> None:
    tables = make(num_blocks=4)
    tables.release(computed(tables, [1, 1, 1, 1]))
    tables.release(computed(tables, [2, 2, 2, 2]))
    tables.release(computed(tables, [1, 1, 1, 1]))  # a second one, which has no name
    assert found(tables, [1, 1, 1, 1]) == (3, 4)  # used last now
    tables.pool.allocate(3)
    assert found(tables, [2, 2, 2, 2]) == (0, 0)
    assert found(tables, [1, 1, 1, 1]) == (3, 4)


# ---- fork and copy-on-write ----


def fork(tables: BlockTables, parent: Sequence, *more: int) -> Sequence:
    child = sequence(tables, [*parent.token_ids, *more])
    tables.fork(parent, child)
    return child


def test_forks_share_all_and_copy_what_they_write() -> None:
    tables = make()
    parent = computed(tables, CHAIN[:6])
    child = fork(tables, parent)
    assert child.block_tables == parent.block_tables
    assert (child.num_computed, child.num_stored) == (5, 6)  # its last token is computed for its own draw
    assert tables.pool.num_held == 2
    assert compute(tables, child, 6) == []  # and nothing is written
    (head, tail), child_tail = parent.block_tables[0], child.block_tables[0][1]
    parent.token_ids.append(50)
    assert tables.missing(parent, 7) == 1
    copies = compute(tables, parent, 7)
    assert copies == [BlockCopy(tail, parent.block_tables[0][1])]
    assert parent.block_tables[0] == [head, copies[0].target]
    child.token_ids.append(60)
    assert tables.missing(child, 7) == 0
    assert compute(tables, child, 7) == [], "the last holder writes in place"
    assert child.block_tables[0] == [head, child_tail]
    tables.pool.check_integrity([*parent.block_tables, *child.block_tables])
    assert tables.pool.num_held == 3


def test_forks_at_a_block_s_end_copy_nothing() -> None:
    tables = make()
    parent = computed(tables, CHAIN[:8])
    child = fork(tables, parent)
    for each in (parent, child):
        each.token_ids.append(50)
        assert tables.missing(each, 9) == 1
        assert compute(tables, each, 9) == []
    assert parent.block_tables[0][:2] == child.block_tables[0][:2]
    assert parent.block_tables[0][2] != child.block_tables[0][2]


def test_a_block_is_copied_in_every_group() -> None:
    tables = make(windows=(None, 6))
    parent = computed(tables, CHAIN[:6])
    child = fork(tables, parent)
    child.token_ids.append(50)
    assert tables.missing(child, 7) == 2
    copies = compute(tables, child, 7)
    assert [copy.source for copy in copies] == [table[1] for table in parent.block_tables]
    assert [copy.target for copy in copies] == [table[1] for table in child.block_tables]


# ---- windows ----


def test_a_window_leaves_blocks_behind() -> None:
    tables = make(block_size=2, windows=(None, 3))
    running = computed(tables, CHAIN[:8])
    tables.slide(running)
    # The next token, at 8, sees 6 and 7: blocks from 3 on.
    assert running.block_tables[1][:3] == [NO_BLOCK] * 3
    assert NO_BLOCK not in running.block_tables[0]
    assert running.num_slid == [0, 3]
    assert tables.pool.num_held == 5
    assert tables.pool.num_cached == 3


def test_a_history_that_is_looked_at_stays_whole() -> None:
    tables = make(block_size=2, windows=(3, 5))
    running = computed(tables, CHAIN[:8], keeps_history=True)
    tables.slide(running)
    assert running.num_slid == [0, 2]


def test_a_windowed_group_needs_what_the_window_sees() -> None:
    """Blocks far behind may be gone; the last that the next token sees may not."""
    tables = make(num_blocks=12, block_size=2, windows=(None, 3))
    chain = computed(tables, CHAIN[:8])
    full, windowed = (list(table) for table in chain.block_tables)
    tables.release(chain)
    pool = tables.pool
    prompt = [*CHAIN[:8], 99]
    made = sequence(tables, prompt)
    assert tables.match(made) == Match(0, 4, (0, 3))
    others = [block for block in range(12) if block not in windowed[:3]]
    pool.allocate(4)  # those that are free
    for block in others:  # used again, so that the window's first three are the oldest
        if pool.state(block) == "cached":
            pool.share(block)
            pool.free([block])
    pool.allocate(3)
    assert [pool.lookup(1, key) for key in made.block_keys[:3]] == [None] * 3
    assert tables.match(made) == Match(0, 4, (0, 3))
    assert adopted(tables, made) == (8, 8)
    assert made.block_tables == [full, [NO_BLOCK] * 3 + windowed[3:]]
    # Without the last of them, the full group's blocks help nobody.
    tables.release(made)
    pool.share(full[0])
    lost = pool.lookup(1, made.block_keys[3])
    assert lost == windowed[3]
    for block in full[1:]:
        pool.share(block)
    pool.allocate(1)
    assert pool.lookup(1, made.block_keys[3]) is None
    assert tables.match(sequence(tables, prompt)).end == 0


def test_who_keeps_its_history_finds_less_where_a_window_has_left_it() -> None:
    tables = make(num_blocks=5, block_size=2, windows=(3,))
    running = computed(tables, CHAIN[:8])
    tables.slide(running)
    tables.pool.allocate(4)  # evicts what the window has left behind
    assert adopted(tables, sequence(tables, [*CHAIN[:8], 99])) == (8, 8)
    assert adopted(tables, sequence(tables, [*CHAIN[:8], 99], keeps_history=True)) == (0, 0)


@settings(max_examples=500)
@given(
    st.sampled_from([(None,), (3,), (None, 3), (2, 6), (None, 2, 5), (3, 3)]),
    st.integers(1, 3),
    st.integers(1, 20),
    st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=12),
    st.booleans(),
)
def test_the_longest_match_there_is(
    windows: tuple[int | None, ...], block_size: int, length: int, lost: set[tuple[int, int]], keeps_history: bool
) -> None:
    """Whatever blocks are gone, one by one in each group: held against trying every length."""
    tables = make(num_blocks=80, block_size=block_size, windows=windows)
    made = sequence(tables, list(range(length)), keeps_history=keeps_history)
    tables.match(made)
    for group in range(len(windows)):
        for index, key in enumerate(made.block_keys):
            if (group, index) not in lost:
                (block,) = tables.pool.allocate(1)
                tables.pool.register(block, BlockName(group, key, index + 1))

    def seen(group: int, position: int) -> int:
        window = windows[group]
        if window is None or (group == 0 and keeps_history):
            return 0
        return max(0, position // block_size * block_size - window + 1) // block_size

    def will_do(end: int) -> bool:
        first = min(end * block_size, length - 1)
        needed = [(group, index) for group in range(len(windows)) for index in range(seen(group, first), end)]
        return not any(name in lost for name in needed)

    assert tables.match(made).end == max(end for end in range(length // block_size + 1) if will_do(end))


# ---- counting ----


def test_what_preempting_would_free_and_lose() -> None:
    tables = make()
    parent = computed(tables, CHAIN[:9])
    assert tables.exclusive(parent) == (3, 9)
    child = fork(tables, parent)
    assert tables.exclusive(parent) == (0, 0)
    child.token_ids.append(50)
    compute(tables, child, 10)
    assert tables.exclusive(child) == (1, 2)
    assert tables.exclusive(parent) == (1, 1)


def test_the_most_that_a_sequence_holds() -> None:
    tables = BlockTables(BlockPool(1), block_size=4, windows=(None, 5), chunk=4)
    assert [tables.blocks_for(count) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [tables.most(count) for count in (4, 12, 16, 400)] == [2, 6, 7, 103]
    all_windowed = BlockTables(BlockPool(1), block_size=4, windows=(5,), chunk=4)
    assert all_windowed.most(400) == 3
    assert all_windowed.most(400, keeps_history=True) == 100


def test_cached_blocks_of_a_window_count_once() -> None:
    """What a match takes up in a window is part of what the window holds at the most: else a prompt that fits would
    never be admitted beside its own cached beginning."""
    tables = BlockTables(BlockPool(4), block_size=1, windows=(4,), chunk=1)
    chain = sequence(tables, CHAIN)
    for end in range(1, 11):
        compute(tables, chain, end)
    tables.release(chain)
    longer = sequence(tables, list(range(40)))
    match = tables.match(longer)
    assert match.end == 10
    assert tables.most(40) == 4
    assert tables.fits(longer, match, 0)


# ---- swap space ----


def contents(tables: BlockTables, made: Sequence) -> list[tuple[int, int]]:
    """What moves back in, as slots and the indexes they go to."""
    transfers = tables.adopt(made, tables.match(made))
    assert not any(transfer.out for transfer in transfers)
    return [(transfer.slot, made.block_tables[0].index(transfer.block)) for transfer in transfers]


def preempt(tables: BlockTables, made: Sequence) -> list[int]:
    """Swapped out: the slots, in the order of the table."""
    table = list(made.block_tables[0])
    transfers = tables.swap_out(made)
    tables.release(made)
    assert all(transfer.out for transfer in transfers)
    assert [transfer.block for transfer in transfers] == [b for b in table if b in [t.block for t in transfers]]
    return [transfer.slot for transfer in transfers]


def evict_all(tables: BlockTables) -> None:
    tables.pool.free(tables.pool.allocate(tables.pool.num_free))


def test_out_and_in_again() -> None:
    tables = make(swap_slots=4)
    running = computed(tables, CHAIN[:11])
    first, second = preempt(tables, running)  # the third is not full
    evict_all(tables)
    assert contents(tables, running) == [(first, 0), (second, 1)]
    assert (running.num_computed, running.num_stored) == (8, 8)
    assert tables.swap is not None
    assert tables.swap.num_used == 0
    tables.pool.check_integrity(running.block_tables)


def test_only_what_is_computed_is_swapped() -> None:
    """In the middle of a prompt, whose later blocks have keys already."""
    tables = make(swap_slots=4)
    running = sequence(tables, CHAIN)
    assert adopted(tables, running) == (0, 0)
    compute(tables, running, 6)
    assert len(running.block_keys) == 3
    assert len(preempt(tables, running)) == 1


def test_what_is_still_cached_is_not_fetched() -> None:
    tables = make(num_blocks=3, swap_slots=4)
    running = computed(tables, CHAIN)
    slots = preempt(tables, running)
    tables.pool.allocate(1)
    tables.pool.free([2])  # the chain's tail is gone
    assert contents(tables, running) == [(slots[2], 2)]
    assert tables.swap is not None
    assert tables.swap.num_used == 0


def test_a_shared_block_is_swapped_once_and_by_its_last_holder() -> None:
    tables = make(swap_slots=8)
    parent = computed(tables, CHAIN[:8])
    child = fork(tables, parent)
    for each, token in ((parent, 50), (child, 60)):
        each.token_ids += [token] * 4
        compute(tables, each, 12)
    assert len(preempt(tables, child)) == 1, "the parent keeps the rest"
    assert len(preempt(tables, parent)) == 3
    assert tables.swap is not None
    assert tables.swap.num_used == 4
    evict_all(tables)
    assert len(contents(tables, child)) == 3, "of the parent's slots too"
    assert tables.swap.num_used == 3, "those are the parent's"
    assert len(contents(tables, parent)) == 1
    assert tables.swap.num_used == 0


def test_two_that_wait_hold_one_slot_together() -> None:
    tables = make(swap_slots=8, keeps=False)
    one = computed(tables, CHAIN[:4])
    (slot,) = preempt(tables, one)
    two = computed(tables, CHAIN[:4])
    assert preempt(tables, two) == [], "there already"
    assert tables.swap is not None
    assert tables.swap.num_used == 1
    tables.forget(one)
    assert tables.swap.lookup(*two.swapped[0]) == slot
    tables.forget(two)
    assert tables.swap.num_used == 0


def test_a_full_swap_space_takes_what_it_can() -> None:
    tables = make(swap_slots=2)
    running = computed(tables, CHAIN)
    assert len(preempt(tables, running)) == 2
    evict_all(tables)
    other = computed(tables, [70, 71, 72, 73])
    assert preempt(tables, other) == []
    assert not other.swapped
    assert [index for _, index in contents(tables, running)] == [0, 1], "from the front: that can be gone on from"
    assert running.num_computed == 8


def test_strangers_use_a_slot_as_well() -> None:
    tables = make(swap_slots=4)
    running = computed(tables, CHAIN[:8])
    preempt(tables, running)
    evict_all(tables)
    stranger = sequence(tables, CHAIN[:8])
    assert len(contents(tables, stranger)) == 2
    assert tables.swap is not None
    assert tables.swap.num_used == 2, "the slots are still the other one's"
    assert contents(tables, running) == []
    assert tables.swap.num_used == 0


def test_what_a_match_counts_on_is_not_evicted_for_it() -> None:
    tables = make(num_blocks=2, swap_slots=2)
    running = computed(tables, CHAIN[:8])
    head, tail = running.block_tables[0]
    preempt(tables, running)
    tables.pool.share(tail)
    tables.pool.free([tail])
    other = computed(tables, [70, 71, 72, 73])
    assert other.block_tables == [[head]], "the head is gone, and the tail is now the oldest"
    tables.release(other)
    assert len(contents(tables, running)) == 1
    assert running.block_tables == [[head, tail]]
