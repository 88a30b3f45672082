"""The block pool: which physical blocks are free, which are cached, and how many tables hold each of the others."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from pagedjax.block_keys import BlockKey


class BlockName(NamedTuple):
    """What a full block holds: the cache group it serves, the key of its tokens and all before them, and how many
    blocks deep that is, itself included."""

    group: int
    key: BlockKey
    depth: int


class BlockPool:
    """Counts references to ``num_blocks`` blocks. A block is free, cached or referenced, exactly one of the three.

    A block that is full may be given a *key* that names its tokens and all before them. When its last reference goes,
    it stays *cached* under its key, and whoever looks for that key may take it up again, until its room is wanted:
    of the cached blocks the one released first is evicted first. A sequence's blocks are released last to first, so a
    chain's tail goes before its head. Free blocks are taken before any is evicted, those freed last first: they are the
    likeliest to be in a processor's cache.

    Args:
        num_blocks: blocks there are.
        num_groups: cache groups; the same key names a different block in each.
        keeps: whether blocks stay cached without a reference. Where not, keys are for sharing among those that run.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1, *, keeps: bool = True):
        self.num_blocks, self.num_groups, self.keeps = num_blocks, num_groups, keeps
        self.ref_counts = [0] * num_blocks
        self.num_evictions = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order of their release
        self._by_key: tuple[dict[BlockKey, int], ...] = tuple({} for _ in range(num_groups))
        self._names: list[BlockName | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds: free ones, and cached ones that can be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that a later prompt may find."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks that nobody holds, each with one reference.

        Raises:
            IndexError: there are fewer; nothing is taken then.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(blocks) < count:
            blocks.append(self._evict())
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a block that is held or cached.

        Raises:
            ValueError: the block is free.
        """
        if self.ref_counts[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free and holds nothing to share")
            del self._cached[block]
        self.ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; one whose last reference goes is cached if it has a key, and free if not.

        Raises:
            ValueError: a block is not held.
        """
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError(f"block {block} is freed twice")
            self.ref_counts[block] -= 1
            if self.ref_counts[block]:
                continue
            if self.keeps and self._names[block] is not None:
                self._cached[block] = None
            else:
                self._forget(block)
                self._free.append(block)

    def register(self, block: int, name: BlockName) -> None:
        """Name a held block that is full. A block that has the name already keeps it, and this one stays without."""
        by_key = self._by_key[name.group]
        if name.key not in by_key:
            by_key[name.key] = block
            self._names[block] = name

    def name(self, block: int) -> BlockName | None:
        """What others find a block by; None for one that is free, or not full, or like a block named before."""
        return self._names[block]

    def lookup(self, group: int, key: BlockKey) -> int | None:
        """The block of this name, held or cached."""
        return self._by_key[group].get(key)

    def forget_all(self) -> None:
        """No block's content can be relied on any more: cached ones are free, held ones lose their names."""
        for block in list(self._cached):
            del self._cached[block]
            self._free.append(block)
        for block in range(self.num_blocks):
            self._forget(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self.num_evictions += 1
        return block

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._by_key[name.group][name.key]
            self._names[block] = None

    def state(self, block: int) -> str:
        """``free``, ``cached`` or ``referenced``."""
        if self.ref_counts[block]:
            return "referenced"
        return "cached" if block in self._cached else "free"

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Compare the pool with the block tables that should hold its references.

        Raises:
            AssertionError: a count differs from the tables, or a block is not in exactly one state.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self.ref_counts, "reference counts differ from the block tables"
        unheld = sorted([*self._free, *self._cached])
        assert unheld == [b for b in range(self.num_blocks) if counts[b] == 0], "free and cached differ from the counts"
        named = [(block, name) for block, name in enumerate(self._names) if name is not None]
        assert all(self._by_key[name.group][name.key] == block for block, name in named), "a key leads elsewhere"
        assert sum(map(len, self._by_key)) == len(named), "a key leads to a block that lost it"
        assert all(self._names[block] is not None for block in self._cached), "a cached block has no name"
        assert all(self._names[block] is None for block in self._free), "a free block has a name"
