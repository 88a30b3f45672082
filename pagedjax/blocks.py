"""The block pool: which physical blocks are free, and how many sequences hold each of the others."""

from collections.abc import Iterable


class BlockPool:
    """Counts references to ``num_blocks`` blocks. A block is free (count 0) or referenced, never both.

    Blocks freed last are handed out first: they are the likeliest to be in a processor's cache.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference.

        Raises:
            IndexError: fewer are free; nothing is taken then.
        """
        if count > len(self._free):
            raise IndexError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; a block whose last reference goes is free again.

        Raises:
            ValueError: a block is not held.
        """
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError(f"block {block} is freed twice")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Compare the pool with the block tables that should hold its references.

        Raises:
            AssertionError: a count differs from the tables, or a block is both free and held.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self.ref_counts, "reference counts differ from the block tables"
        free = sorted(self._free)
        assert free == [b for b in range(self.num_blocks) if counts[b] == 0], "the free list differs from the counts"
