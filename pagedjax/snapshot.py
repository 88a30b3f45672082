"""The block pool as something to look at: every block and every sequence at one moment, as plain JSON data."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from pagedjax.request import NO_BLOCK, Sequence
from pagedjax.scheduler import Scheduler


def pool_snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """What ``GET /debug/blocks`` shows. To be called by whoever drives the scheduler, between two plans.

    As everywhere in the host column, tokens count as soon as they are planned: a slot is filled when a step that has
    been planned writes it, and a sequence has the token that is being sampled.

    Returns:
        ``num_blocks`` and ``block_size`` (slots in a block), and two lists.

        ``blocks`` has every block, in the order of their ``id``:

        - ``state``: ``free``, ``cached`` (nobody holds it, and a prompt may find it) or ``referenced``;
        - ``ref_count``: entries in block tables that hold it;
        - ``filled``: slots that hold a token;
        - ``owners``: ids of the requests whose sequences hold it, each once, in the order of turn;
        - ``hash_depth``: full blocks in the chain of keys that ends with its own; 0 where it has no key: it is free,
          or not full, or as full as another block that has the key;
        - ``group``: the cache group whose layers it serves; None where it is free.

        ``requests`` has every *sequence* that runs or waits, in the order of turn, so that a request with several has
        several entries, next to each other:

        - ``id``: the request's;
        - ``state``: ``running`` or ``waiting`` (who has finished is gone);
        - ``tokens``: prompt and output;
        - ``block_tables``: one per cache group, all equally long; None where a block has left the group's window.
    """
    pool, size = scheduler.pool, scheduler.tables.block_size
    sequences = sorted(_sequences(scheduler), key=attrgetter("order"))
    filled = [0] * pool.num_blocks
    owners = [list[str]() for _ in filled]
    groups: list[int | None] = [None] * pool.num_blocks
    for sequence in sequences:
        request_id, (num_full, rest) = sequence.request_id, divmod(sequence.num_stored, size)
        for group, table in enumerate(sequence.block_tables):
            for index, block in enumerate(table):
                if block == NO_BLOCK:
                    continue
                groups[block] = group
                if index <= num_full:  # who shares a block has the same tokens in it: a write copies it first
                    filled[block] = size if index < num_full else rest
                held_by = owners[block]
                if not held_by or held_by[-1] != request_id:  # a request's sequences follow each other
                    held_by.append(request_id)
    blocks = [
        {
            "id": block,
            "state": pool.state(block),
            "ref_count": pool.ref_counts[block],
            "filled": filled[block] if name is None else size,
            "owners": owners[block],
            "hash_depth": 0 if name is None else name.depth,
            "group": groups[block] if name is None else name.group,
        }
        for block, name in enumerate(map(pool.name, range(pool.num_blocks)))
    ]
    requests = [_as_json(sequence) for sequence in sequences]
    return {"num_blocks": pool.num_blocks, "block_size": size, "blocks": blocks, "requests": requests}


def _sequences(scheduler: Scheduler) -> Iterator[Sequence]:
    for queue in (scheduler.running, scheduler.waiting):
        for sequence in queue:
            yield sequence
            yield from sequence.forks


def _as_json(sequence: Sequence) -> dict[str, Any]:
    tables = [[None if block == NO_BLOCK else block for block in table] for table in sequence.block_tables]
    return {
        "id": sequence.request_id,
        "state": sequence.state.value,
        "tokens": sequence.num_tokens,
        "block_tables": tables,
    }
