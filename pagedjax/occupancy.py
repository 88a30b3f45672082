"""How full the held blocks are: the difference between memory held and memory used."""

from collections.abc import Iterable

from pagedjax.block_tables import BlockTables
from pagedjax.request import Sequence


def slots_filled(tables: BlockTables, running: Iterable[Sequence]) -> int:
    """Slots of held blocks that hold a token: all but those behind each table's end, which forks have in common."""
    counts, size = tables.pool.ref_counts, tables.block_size
    unfilled = 0
    shared: set[int] = set()
    for sequence in running:
        table = sequence.block_tables[0]
        missing = len(table) * size - sequence.num_stored
        if missing > 0:
            last = table[-1]
            if counts[last] > 1:
                if last in shared:
                    continue
                shared.add(last)
            unfilled += missing
    return tables.pool.num_held * size - unfilled * tables.num_groups
