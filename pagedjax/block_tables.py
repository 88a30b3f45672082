"""Block tables over the pool: matching cached prefixes, growing, forking, copying on write, leaving a window behind.

A sequence has one table per cache group (``CacheLayout``), all equally long. Entry ``i`` is the block of tokens
``i * block_size`` and on; `NO_BLOCK` where every token has left the group's window.
"""

from dataclasses import dataclass

from pagedjax.block_keys import BlockKey, next_key
from pagedjax.blocks import BlockName, BlockPool
from pagedjax.cache_layout import window_blocks
from pagedjax.request import NO_BLOCK, Sequence
from pagedjax.swap_space import SwapSpace, Transfer


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix that need not be computed: blocks ``start`` to ``end`` of a sequence are cached or in the swap space.

    ``first`` is the first of them that each group's window still sees from the first token to compute.
    """

    start: int
    end: int
    first: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: block ``source`` is copied to ``target`` before the step writes anything."""

    source: int
    target: int


class BlockTables:
    """Paged tables: a block is taken when its first token comes, and shared wherever it can be.

    Args:
        pool: the blocks.
        block_size: slots in a block.
        windows: of each cache group, in tokens; None for a group that sees all.
        chunk: tokens of one sequence in one step at the most.
        swap: where preempted sequences' blocks go; None for nowhere.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        chunk: int,
        swap: SwapSpace | None = None,
    ):
        self.pool, self.block_size, self.windows, self.chunk, self.swap = pool, block_size, windows, chunk, swap
        self.num_groups = len(windows)
        self._windowed = tuple(group for group, window in enumerate(windows) if window is not None)

    # ---- how many blocks ----

    def blocks_for(self, num_tokens: int) -> int:
        """Entries in a table that has room for ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def most(self, num_tokens: int, *, keeps_history: bool = False) -> int:
        """Blocks that a sequence of ``num_tokens`` holds at the most, whichever way it comes to be so long."""
        whole = self.blocks_for(num_tokens)
        windows = (None, *self.windows[1:]) if keeps_history else self.windows
        return sum(self._most_in(window, whole) for window in windows)

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks to take from the pool so that the tokens up to ``num_tokens`` can be written."""
        table = sequence.block_tables[0]
        new = self.blocks_for(num_tokens) - len(table)
        if new < 0:
            new = 0
        first = sequence.num_stored // self.block_size
        if first < len(table) and num_tokens > sequence.num_stored and self.pool.ref_counts[table[first]] > 1:
            new += 1
        return new * self.num_groups

    def promised(self, sequence: Sequence) -> int:
        """Blocks that a running sequence's known tokens still need, and one per group to grow."""
        new = self.blocks_for(sequence.num_tokens) - len(sequence.block_tables[0])
        if new <= 0:
            return self.num_groups
        return sum(1 + self._needed(sequence, group, new) for group in range(self.num_groups))

    def is_on_device(self, sequence: Sequence, match: Match) -> bool:
        """Whether nothing of a match has to be swapped in."""
        keys = sequence.block_keys
        lookup = self.pool.lookup
        return all(lookup(g, key) is not None for g, at in enumerate(match.first) for key in keys[at : match.end])

    def to_admit(self, sequence: Sequence, match: Match) -> int:
        """Blocks that nobody holds now and that a waiting sequence's known tokens take, with this match."""
        new = self.blocks_for(sequence.num_tokens) - match.end
        return sum(
            self._most_in(self._window(sequence, group), self._to_adopt(sequence, group, match) + new)
            for group in range(self.num_groups)
        )

    def _to_adopt(self, sequence: Sequence, group: int, match: Match) -> int:
        found = (self.pool.lookup(group, key) for key in sequence.block_keys[match.first[group] : match.end])
        return sum(block is None or not self.pool.ref_counts[block] for block in found)

    def fits(self, sequence: Sequence, match: Match, promised: int) -> bool:
        """Whether a waiting sequence's known tokens fit beside ``promised`` blocks that those who run will take."""
        return self.to_admit(sequence, match) + promised <= self.pool.num_free

    def exclusive(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks that only this sequence holds, and tokens that stand in no block but these: what preempting it frees,
        and what it costs to bring it back beside what others keep for it."""
        counts = self.pool.ref_counts
        blocks = sum(b != NO_BLOCK and counts[b] == 1 for table in sequence.block_tables for b in table)
        lost = sum(b != NO_BLOCK and counts[b] == 1 for b in sequence.block_tables[0])
        unfilled = len(sequence.block_tables[0]) * self.block_size - sequence.num_computed
        return blocks, max(0, lost * self.block_size - unfilled)

    def _most_in(self, window: int | None, blocks: int) -> int:
        """Blocks that a group holds at once of ``blocks`` in a row."""
        return min(blocks, window_blocks(window, self.block_size, self.chunk) or blocks)

    def _needed(self, sequence: Sequence, group: int, new: int) -> int:
        window = self._window(sequence, group)
        if window is None:
            return new
        held = len(sequence.block_tables[group]) - sequence.num_slid[group]
        return max(0, min(new, self._most_in(window, new + held) - held))

    def _window(self, sequence: Sequence, group: int) -> int | None:
        """Penalties read a sequence's history through its first table, which is whole then."""
        return None if group == 0 and sequence.keeps_history else self.windows[group]

    # ---- shared prefixes ----

    def match(self, sequence: Sequence) -> Match:
        """The longest prefix from where the sequence's tables end that is there already, block by block.

        A group with a window needs the blocks that the first token to compute still sees, no more. At least one token
        is left to compute: the one after which the next is drawn.
        """
        start = len(sequence.block_tables[0])
        end = len(sequence.token_ids) // self.block_size
        if sequence.root_key is None or not sequence.reads_cache or end <= start:
            return Match(start, start, (start,) * self.num_groups)
        self.name_blocks(sequence, end)
        for group in range(self.num_groups):
            if self._window(sequence, group) is None:
                found = start
                while found < end and self._is_there(group, sequence.block_keys[found]):
                    found += 1
                end = found
        last = None
        while end != last:
            last = end
            for group in self._windowed:
                if self._window(sequence, group) is not None:
                    end = self._seen_end(sequence, group, start, end)
        first = self._resume_at(sequence, end)
        return Match(
            start, end, tuple(max(start, self._first_seen(sequence, g, first)) for g in range(self.num_groups))
        )

    def adopt(self, sequence: Sequence, match: Match) -> list[Transfer]:
        """Take up a match: the sequence's tables go on with its blocks, and it has that much less to compute.

        Returns:
            What has to be brought back from the swap space before the step runs.
        """
        transfers = []
        swapped: list[tuple[int, int]] = []
        for group, table in enumerate(sequence.block_tables):
            table += [NO_BLOCK] * (match.end - match.start)
            for index in range(match.first[group], match.end):
                block = self.pool.lookup(group, sequence.block_keys[index])
                if block is None:
                    swapped.append((group, index))
                else:
                    self.pool.share(block)
                    table[index] = block
        for group, index in swapped:  # only now: taking a block may evict one that the match counts on
            key = sequence.block_keys[index]
            slot = self.swap.lookup(group, key) if self.swap else None
            assert slot is not None, "a match holds what is cached or swapped"
            (block,) = self.pool.allocate(1)
            sequence.block_tables[group][index] = block
            self.pool.register(block, BlockName(group, key, index + 1))
            transfers.append(Transfer(block, slot, out=False))
        sequence.num_computed = max(sequence.num_computed, self._resume_at(sequence, match.end))
        sequence.num_stored = max(sequence.num_stored, match.end * self.block_size)
        sequence.num_registered = max(sequence.num_registered, match.end)
        self.slide(sequence)
        self._drop_swapped(sequence)
        return transfers

    def register(self, sequence: Sequence) -> None:
        """Name the blocks that have become full of known tokens, so that others may share them."""
        end = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        if sequence.root_key is None or end <= sequence.num_registered:
            return
        self.name_blocks(sequence, end)
        for group, table in enumerate(sequence.block_tables):
            for index in range(max(sequence.num_registered, sequence.num_slid[group]), end):
                self.pool.register(table[index], BlockName(group, sequence.block_keys[index], index + 1))
        sequence.num_registered = end

    def name_blocks(self, sequence: Sequence, end: int) -> None:
        """Make the keys of the sequence's first ``end`` blocks."""
        keys, size = sequence.block_keys, self.block_size
        while len(keys) < end:
            parent = keys[-1] if keys else sequence.root_key
            keys.append(next_key(parent, sequence.token_ids[len(keys) * size : (len(keys) + 1) * size]))

    def _resume_at(self, sequence: Sequence, end: int) -> int:
        """The first token to compute when the first ``end`` blocks are there: at least the last one known."""
        return min(end * self.block_size, len(sequence.token_ids) - 1)

    def _is_there(self, group: int, key: BlockKey) -> bool:
        if self.pool.lookup(group, key) is not None:
            return True
        return self.swap is not None and self.swap.lookup(group, key) is not None

    def _seen_end(self, sequence: Sequence, group: int, start: int, end: int) -> int:
        """The largest end up to ``end`` of a match whose last blocks, as far back as the window sees, are there."""
        while end > start:
            first = max(start, self._first_seen(sequence, group, self._resume_at(sequence, end)))
            index = end - 1
            while index >= first and self._is_there(group, sequence.block_keys[index]):
                index -= 1
            if index < first:
                return end
            end = index
        return start

    def _first_seen(self, sequence: Sequence, group: int, position: int) -> int:
        """The first block that a token at ``position``, or at the start of its block, sees."""
        window = self._window(sequence, group)
        if window is None:
            return 0
        return max(0, position // self.block_size * self.block_size - window + 1) // self.block_size

    # ---- growing and leaving ----

    def grow(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
        """Take what ``missing`` counts. A block that others hold too is copied before the first write into it."""
        copies = []
        first = sequence.num_stored // self.block_size
        if first < len(sequence.block_tables[0]) and num_tokens > sequence.num_stored:
            for table in sequence.block_tables:
                block = table[first]
                if self.pool.ref_counts[block] > 1:
                    (table[first],) = self.pool.allocate(1)
                    self.pool.free([block])
                    copies.append(BlockCopy(block, table[first]))
        new = self.blocks_for(num_tokens) - len(sequence.block_tables[0])
        if new > 0:
            for table in sequence.block_tables:
                table += self.pool.allocate(new)
        return copies

    def slide(self, sequence: Sequence) -> None:
        """Give back the blocks that the sequence's next token no longer sees.

        It may yet be computed again from the start of its block, so what that would see stays.
        """
        for group in self._windowed:
            first = self._first_seen(sequence, group, sequence.num_computed)
            slid = sequence.num_slid[group]
            if first > slid:
                table = sequence.block_tables[group]
                self.pool.free(b for b in reversed(table[slid:first]) if b != NO_BLOCK)
                table[slid:first] = [NO_BLOCK] * (first - slid)
                sequence.num_slid[group] = first

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let ``child``, whose tokens begin with those of ``parent``, hold all its blocks too.

        The child's last known token is computed for the draw after it, and not written again if the parent has.

        Returns:
            Whether blocks can be shared at all.
        """
        for table in parent.block_tables:
            for block in table:
                if block != NO_BLOCK:
                    self.pool.share(block)
        child.block_tables = [list(table) for table in parent.block_tables]
        child.num_slid = list(parent.num_slid)
        child.block_keys, child.num_registered = list(parent.block_keys), parent.num_registered
        child.num_computed = min(parent.num_computed, len(child.token_ids) - 1)
        child.num_stored = parent.num_stored
        return True

    def swap_out(self, sequence: Sequence) -> list[Transfer]:
        """Find slots for the full blocks that would be lost with this sequence, while slots last."""
        transfers: list[Transfer] = []
        if self.swap is None:
            return transfers
        for group, table in enumerate(sequence.block_tables):
            for index in range(sequence.num_slid[group], sequence.num_registered):
                block, key = table[index], sequence.block_keys[index]
                named = self.pool.lookup(group, key)
                if self.pool.ref_counts[block] > 1 or (named not in (None, block) and self.pool.ref_counts[named]):
                    continue  # others keep it
                if not self.swap.hold(group, key):
                    slot = self.swap.take(group, key)
                    if slot is None:
                        return transfers
                    transfers.append(Transfer(block, slot, out=True))
                sequence.swapped.append((group, key))
        return transfers

    def release(self, sequence: Sequence) -> None:
        """Drop all that the sequence holds in the pool."""
        for table in sequence.block_tables:
            self.pool.free(block for block in reversed(table) if block != NO_BLOCK)
        sequence.block_tables = [[] for _ in self.windows]
        sequence.num_slid = [0] * self.num_groups
        sequence.num_computed = sequence.num_stored = sequence.num_registered = 0

    def forget(self, sequence: Sequence) -> None:
        """Drop all that a sequence holds that never comes back."""
        self.release(sequence)
        self._drop_swapped(sequence)

    def _drop_swapped(self, sequence: Sequence) -> None:
        if self.swap is not None:
            for group, key in sequence.swapped:
                self.swap.drop(group, key)
            sequence.swapped.clear()
