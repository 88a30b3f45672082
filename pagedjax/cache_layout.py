"""Which layers of a model share a block: cache groups, so that a layer with a window holds only what it still sees.

Ground floor: the scheduler counts blocks by it, the decoder finds a layer's keys and values by it.
"""

from dataclasses import dataclass
from functools import cache

# Places that may stay empty where a kind's layers do not divide evenly; more groups would waste less, and each is one
# more block table per sequence. What is wasted on a window ends with the window.
_MOST_WASTE = 0.1
_MOST_WASTE_IN_WINDOW = 0.25


@dataclass(frozen=True)
class CacheLayout:
    """How layers lie in blocks. A block has ``depth`` places and belongs to one group, which puts a layer in each.

    All blocks are therefore equally large, and one pool serves layers that need few of them and layers that need many.

    Attributes:
        windows: of each group, in tokens, the query itself included; None sees all. A group that sees all comes first
            if there is one: a sequence's history is read through its table.
        depth: layers in a block.
        group_of: each layer's group.
        place_of: each layer's place in its group's blocks; it never decreases where windows alternate regularly.
    """

    windows: tuple[int | None, ...]
    depth: int
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Block tables per sequence."""
        return len(self.windows)

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Blocks that a sequence of ``num_tokens`` holds at the most, computed in chunks of at most ``chunk``."""
        whole = -(-num_tokens // block_size)
        return sum(min(whole, window_blocks(window, block_size, chunk) or whole) for window in self.windows)


def window_blocks(window: int | None, block_size: int, chunk: int) -> int | None:
    """Blocks that a group holds of a sequence at the most, whatever its length; None for no limit.

    A chunk may begin in a block's last slot, and what that block's first slot sees is kept (``BlockTables.slide``).
    """
    if window is None:
        return None
    return -(-(block_size - 1 + chunk) // block_size) + -(-(window - 1) // block_size)


@cache
def cache_layout(windows: tuple[int | None, ...]) -> CacheLayout:
    """The layout for layers with these windows: the deepest blocks that leave few of their places empty.

    Layers of one window are dealt out to their groups in turn, so that a regular pattern of windows repeats from place
    to place.
    """
    kinds = sorted(dict.fromkeys(windows), key=lambda window: (window is not None, window or 0))
    counts = {kind: windows.count(kind) for kind in kinds}
    depth = max(d for d in range(1, max(counts.values()) + 1) if all(_fits(kind, counts[kind], d) for kind in kinds))
    groups: list[int | None] = []
    first = {}
    for kind in kinds:
        first[kind] = len(groups)
        groups += [kind] * -(-counts[kind] // depth)
    group_of, place_of = [], []
    seen = dict.fromkeys(kinds, 0)
    for window in windows:
        place, group = divmod(seen[window], -(-counts[window] // depth))
        group_of.append(first[window] + group)
        place_of.append(place)
        seen[window] += 1
    return CacheLayout(tuple(groups), depth, tuple(group_of), tuple(place_of))


def _fits(window: int | None, count: int, depth: int) -> bool:
    """Whether ``count`` layers waste little of blocks of this depth."""
    most = _MOST_WASTE if window is None else _MOST_WASTE_IN_WINDOW
    return -(-count // depth) * depth <= count * (1 + most)
