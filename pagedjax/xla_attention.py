"""Paged attention in plain JAX, made for CPUs: a row has the same bits whatever runs beside it (ADR 2)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.attention_batch import AttentionBatch
from pagedjax.ordered_sum import sum_in_order

# Context tokens per iteration. Fixed, and counted from the sequence's first token: a row's softmax then runs through
# the same products in the same order whatever its neighbours, its chunk or its bucket.
CONTEXT_CHUNK = 128
# Decode rows that share an iteration, and query tokens in a tile of a prefill chunk.
DECODE_GROUP = 8
QUERY_TILE = 32
# XLA's CPU products give other bits for other numbers of rows, unless these are padded to (ADR 2).
_ROW_MULTIPLE = 4
_HEAD_DIM_MULTIPLE = 64

_MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


# Traced once for all layers of a kind: tracing it for each would take most of a warm start.
@partial(jax.jit, static_argnames=("scale", "softcap"))
def paged_attention_xla(
    q: jax.Array,
    k_layer: jax.Array,
    v_layer: jax.Array,
    batch: AttentionBatch,
    *,
    scale: float,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal attention of each query over its sequence's cached context, grouped heads, softmax in float32.

    Every loop has a traced trip count, so the context's length is no shape, and padding costs nothing. Decode rows
    run in groups, prefill chunks in tiles of queries; both are :func:`_attend` on a different batch.

    Args:
        q: ``[T, heads, head_dim]``, float32 or bfloat16, T at least ``DECODE_GROUP``.
        k_layer, v_layer: ``[num_blocks, kv_heads, block_size, head_dim]``, this step's tokens already written.
        batch: the step's sequences.
        scale: factor of the scores.
        window: a query sees this many tokens, itself included; None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[T, heads, head_dim]`` float32; rows of padding are unspecified but finite.
    """
    num_tokens, heads, head_dim = q.shape
    kv_heads = k_layer.shape[1]
    groups = heads // kv_heads
    grouped = q.reshape(num_tokens, kv_heads, groups, head_dim).astype(k_layer.dtype)
    grouped = jnp.pad(grouped, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))  # slices never run past the end
    attend = partial(_attend, k_layer=k_layer, v_layer=v_layer, scale=scale, window=window, softcap=softcap)

    def decode_group(i: jax.Array, out: jax.Array) -> jax.Array:
        first = i * DECODE_GROUP
        rows = lax.dynamic_slice_in_dim(grouped, first, DECODE_GROUP)[:, None]
        lens = lax.dynamic_slice_in_dim(batch.kv_lens, first, DECODE_GROUP)
        lens = jnp.where(first + jnp.arange(DECODE_GROUP) < batch.num_decodes, lens, 0)
        tables = lax.dynamic_slice_in_dim(batch.block_tables, first, DECODE_GROUP)
        result = attend(rows, block_tables=tables, positions=lens[:, None] - 1)
        return lax.dynamic_update_slice_in_dim(out, result[:, 0], first, 0)

    tile_ends = jnp.cumsum(_tiles_per_sequence(batch))

    def prefill_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        seq = jnp.sum(tile_ends <= i, dtype=jnp.int32)
        in_seq = i - jnp.where(seq > 0, tile_ends[seq - 1], 0)
        end = batch.cu_q_lens[seq + 1]
        first = batch.cu_q_lens[seq] + in_seq * QUERY_TILE
        offsets = jnp.arange(QUERY_TILE)
        positions = batch.kv_lens[seq] - (end - first) + offsets
        positions = jnp.where(first + offsets < end, positions, -1)
        rows = lax.dynamic_slice_in_dim(grouped, first, QUERY_TILE)[None]
        result = attend(rows, block_tables=batch.block_tables[seq][None], positions=positions[None])
        # What a last tile writes past its sequence's end, the next sequence's tiles write over.
        return lax.dynamic_update_slice_in_dim(out, result[0], first, 0)

    out = jnp.zeros(grouped.shape, jnp.float32)
    out = lax.fori_loop(0, -(-batch.num_decodes // DECODE_GROUP), decode_group, out)
    out = lax.fori_loop(0, tile_ends[-1], prefill_tile, out)
    return out[:num_tokens].reshape(num_tokens, heads, head_dim)


def _tiles_per_sequence(batch: AttentionBatch) -> jax.Array:
    """``[S]`` query tiles of each prefill chunk, 0 for decode rows and padding."""
    index = jnp.arange(batch.kv_lens.shape[0])
    tiles = -(-jnp.diff(batch.cu_q_lens) // QUERY_TILE)
    return jnp.where((index >= batch.num_decodes) & (index < batch.num_seqs), tiles, 0)


def _attend(
    q: jax.Array,
    *,
    k_layer: jax.Array,
    v_layer: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    scale: float,
    window: jax.Array | int | None,
    softcap: float | None,
) -> jax.Array:
    """N sequences' queries over their contexts, by online softmax in chunks of the context (FlashAttention).

    Args:
        q: ``[N, Q, kv_heads, groups, head_dim]``.
        block_tables: ``[N, max_blocks]``.
        positions: ``[N, Q]`` position of each query; -1 sees nothing and gives 0.

    Returns:
        ``[N, Q, kv_heads, groups, head_dim]`` float32.
    """
    n, num_queries, kv_heads, groups, head_dim = q.shape
    num_blocks, _, block_size, _ = k_layer.shape
    chunk_blocks = CONTEXT_CHUNK // block_size
    num_rows = num_queries * groups
    rows = jnp.moveaxis(q, 2, 1).reshape(n, kv_heads, num_rows, head_dim)
    rows = _pad_multiple(rows, 2, _ROW_MULTIPLE)
    row_positions = _pad_multiple(jnp.repeat(positions, groups, axis=1), 1, _ROW_MULTIPLE, value=-1)
    tables = _pad_multiple(block_tables, 1, chunk_blocks)

    def gather(layer: jax.Array, blocks: jax.Array) -> jax.Array:
        """``[N, kv_heads, CONTEXT_CHUNK, head_dim]`` of ``[N, chunk_blocks]``; heads first, so nothing moves twice."""
        flat = layer.reshape(num_blocks * kv_heads, block_size, head_dim)
        index = blocks[:, None, :] * kv_heads + jnp.arange(kv_heads)[None, :, None]
        return flat[index].reshape(n, kv_heads, CONTEXT_CHUNK, head_dim)

    def chunk(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, total, acc = carry
        blocks = lax.dynamic_slice_in_dim(tables, i * chunk_blocks, chunk_blocks, axis=1)
        k, v = gather(k_layer, blocks), _pad_multiple(gather(v_layer, blocks), 3, _HEAD_DIM_MULTIPLE)
        scores = jnp.einsum("nhrd,nhcd->nhrc", rows, k, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = i * CONTEXT_CHUNK + jnp.arange(CONTEXT_CHUNK)
        seen = at <= row_positions[:, :, None]
        if window is not None:
            seen &= at > row_positions[:, :, None] - window
        seen = seen[:, None]
        m_new = jnp.maximum(m, jnp.max(jnp.where(seen, scores, _MASKED), axis=-1))
        p = jnp.where(seen, jnp.exp(scores - m_new[..., None]), 0.0)
        decay = jnp.exp(m - m_new)
        pv = jnp.einsum("nhrc,nhcd->nhrd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return m_new, total * decay + sum_in_order(p)[..., 0], acc * decay[..., None] + pv

    last = jnp.max(row_positions) // CONTEXT_CHUNK + 1
    first = jnp.zeros((), jnp.int32)
    if window is not None:
        oldest = jnp.min(jnp.where(row_positions >= 0, row_positions, jnp.iinfo(jnp.int32).max))
        first = jnp.maximum(oldest - window + 1, 0) // CONTEXT_CHUNK
    shape = rows.shape[:3]
    start = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim + -head_dim % _HEAD_DIM_MULTIPLE), jnp.float32),
    )
    _, total, acc = lax.fori_loop(first, last, chunk, start)
    out = acc[..., :head_dim] / jnp.where(total > 0, total, 1.0)[..., None]
    out = out[:, :, :num_rows].reshape(n, kv_heads, num_queries, groups, head_dim)
    return jnp.moveaxis(out, 1, 2)


def _pad_multiple(x: jax.Array, axis: int, multiple: int, value: int = 0) -> jax.Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=value)
