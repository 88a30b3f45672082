"""What came before paging, to compare with: one contiguous reservation per sequence, by a buddy allocator.

The baselines of the PagedAttention paper (arXiv 2309.06180, section 6.1): Orca reserves room for a request's whole
length when it is admitted, because its keys and values must lie in one piece. The three differ in what they know of the
output's length. Scheduler and step run unchanged over them; nothing is shared, grows, or is ever preempted for want of
a block.
"""

from pagedjax.block_tables import BlockTables, Match
from pagedjax.blocks import BlockPool
from pagedjax.request import Sequence
from pagedjax.swap_space import Transfer

KINDS = ("max", "pow2", "oracle")


class RegionPool(BlockPool):
    """A pool that hands out regions of 2^k adjacent blocks, and joins them again (Knuth's buddy system).

    A number of blocks that is no power of two is several regions to begin with, each of which starts at a multiple of
    its size.
    """

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks, keeps=False)
        self._orders: dict[int, int] = {}  # of the regions that are taken, by their first block
        self._regions: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]  # free ones, by order
        start = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._regions[order].add(start)
                start += 1 << order

    @property
    def largest_region(self) -> int:
        """Blocks of the largest region there can be."""
        return 1 << (self.num_blocks.bit_length() - 1)

    def has_room(self, count: int) -> bool:
        """Whether some free region holds ``count`` blocks."""
        return any(self._regions[_order(count) :])

    def take(self, count: int) -> range:
        """The smallest region that holds ``count`` blocks, the lowest of these; there must be one."""
        wanted = _order(count)
        order = next(k for k in range(wanted, len(self._regions)) if self._regions[k])
        start = min(self._regions[order])
        self._regions[order].remove(start)
        while order > wanted:  # the upper half of what is too large stays free
            order -= 1
            self._regions[order].add(start + (1 << order))
        region = range(start, start + (1 << wanted))
        self._orders[start] = wanted
        self._free = [block for block in self._free if block not in region]
        for block in region:
            self.ref_counts[block] = 1
        return region

    def give_back(self, start: int) -> None:
        """Free the region that begins with block ``start``, joined with its buddy as far as that is free."""
        order = self._orders.pop(start)
        self.free(range(start, start + (1 << order)))
        while order + 1 < len(self._regions) and (buddy := start ^ (1 << order)) in self._regions[order]:
            self._regions[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._regions[order].add(start)


class ContiguousTables(BlockTables):
    """Block tables whose entries follow each other, all taken at admission.

    Args:
        num_blocks: blocks there are.
        block_size: slots in a block.
        kind: ``max`` reserves ``max_model_len``, ``pow2`` the prompt and the next power of two of the output's true
            length, ``oracle`` prompt and output as long as they will be. ``Sequence.max_tokens`` is taken for the
            true length.
        max_model_len: tokens that a sequence may have.
        chunk: tokens of one sequence in one step at the most.
    """

    pool: RegionPool

    def __init__(self, num_blocks: int, *, block_size: int, kind: str, max_model_len: int, chunk: int):
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        super().__init__(RegionPool(num_blocks), block_size=block_size, chunk=chunk)
        self.kind, self.max_model_len = kind, max_model_len

    def reserved(self, num_prompt: int, num_output: int) -> int:
        """Tokens that are reserved for a sequence."""
        if self.kind == "max":
            return self.max_model_len
        if self.kind == "pow2":
            num_output = 1 << (num_output - 1).bit_length() if num_output else 0
        return min(num_prompt + num_output, self.max_model_len)

    def most(self, num_tokens: int, *, keeps_history: bool = False) -> int:
        """Blocks of the region that a sequence of ``num_tokens`` needs; more than there are if none is so large."""
        blocks = self.blocks_for(self.reserved(num_tokens, 0))
        return blocks if 1 << _order(blocks) <= self.pool.largest_region else self.pool.num_blocks + 1

    def promised(self, sequence: Sequence) -> int:
        """Nothing: everything was taken at admission."""
        return 0

    def match(self, sequence: Sequence) -> Match:
        """Nothing is shared."""
        start = len(sequence.block_tables[0])
        return Match(start, start, (start,))

    def fits(self, sequence: Sequence, match: Match, promised: int) -> bool:
        """Whether there is a region for all that the sequence may come to."""
        return self.pool.has_room(self._blocks(sequence))

    def adopt(self, sequence: Sequence, match: Match) -> list[Transfer]:
        """Take the sequence's region."""
        sequence.block_tables[0] += self.pool.take(self._blocks(sequence))
        return []

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """A child has a region of its own, and computes all of it."""
        return False

    def release(self, sequence: Sequence) -> None:
        """Give the region back."""
        table, sequence.block_tables = sequence.block_tables[0], [[]]
        if table:
            self.pool.give_back(table[0])
        super().release(sequence)

    def _blocks(self, sequence: Sequence) -> int:
        return self.blocks_for(self.reserved(sequence.num_prompt, sequence.max_tokens))


def _order(count: int) -> int:
    """The k of the smallest 2^k that is ``count`` or more."""
    return (count - 1).bit_length() if count else 0
