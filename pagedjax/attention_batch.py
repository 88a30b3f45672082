"""Where the sequences of a step lie among its packed tokens."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionBatch:
    """Where each sequence's queries and context lie; the same for every layer.

    Sequence ``s`` has queries ``cu_q_lens[s]`` to ``cu_q_lens[s + 1]`` of the packed tokens, the last of them at
    position ``kv_lens[s] - 1``. The first ``num_decodes`` sequences have one query each.

    Attributes:
        block_tables: ``[S, max_blocks]`` int32 physical blocks; unused entries are any valid block. In a step's input
            there is one for each cache group, ``[G, S, max_blocks]``; each layer attends through its group's.
        cu_q_lens: ``[S + 1]`` int32; sequences past ``num_seqs`` are empty.
        kv_lens: ``[S]`` int32 tokens of context, this step's included; 0 for padding.
        num_decodes, num_seqs: int32 scalars.
    """

    block_tables: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    num_decodes: jax.Array
    num_seqs: jax.Array
