"""The derivative of paged attention, for every backend: the same function once more, in loops that JAX can turn round.

A backend's own loops run as often as a value says, which reverse-mode differentiation does not know how to undo.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.attention_batch import AttentionBatch

_QUERY_TILE = 32


def attend_by_tiles(
    q: jax.Array,
    k_layer: jax.Array,
    v_layer: jax.Array,
    batch: AttentionBatch,
    *,
    scale: float,
    window: jax.Array | int | None,
    softcap: float | None,
) -> jax.Array:
    """Attention as in `attention.AttentionBackend`, differentiable in q, k_layer and v_layer in both modes.

    A tile of queries takes its sequence's context as long as block tables are, and is computed again on the way back:
    memory is one tile's scores and context.
    """
    num_tokens, heads, _ = q.shape
    sequences = batch.kv_lens.shape[0]
    starts = batch.cu_q_lens // _QUERY_TILE + jnp.arange(sequences + 1)

    def tile(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        sequence = jnp.clip(jnp.sum(starts <= number) - 1, 0, sequences - 1)
        begin, end = batch.cu_q_lens[sequence], batch.cu_q_lens[sequence + 1]
        token = begin + (number - starts[sequence]) * _QUERY_TILE + jnp.arange(_QUERY_TILE)
        is_row = token < end
        position = jnp.where(is_row, batch.kv_lens[sequence] - end + token, -1)
        k, v = (_context(layer, batch.block_tables[sequence]) for layer in (k_layer, v_layer))
        rows = q[jnp.minimum(token, num_tokens - 1)].astype(jnp.float32)
        rows = rows.reshape(_QUERY_TILE, k.shape[0], heads // k.shape[0], -1)
        scores = jnp.einsum("thgd,hcd->thgc", rows, k, precision=lax.Precision.HIGHEST) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = jnp.arange(k.shape[1])
        seen = at <= position[:, None]
        if window is not None:
            seen &= at > position[:, None] - window
        # Rows that see nothing are no rows; they may see the first token here, so that no softmax is empty.
        scores = jnp.where((seen | (at == 0) & ~is_row[:, None])[:, None, None], scores, -jnp.inf)
        out = jnp.einsum("thgc,hcd->thgd", jax.nn.softmax(scores), v, precision=lax.Precision.HIGHEST)
        return jnp.where(is_row, token, num_tokens), out.reshape(_QUERY_TILE, heads, -1)

    num_tiles = num_tokens // _QUERY_TILE + sequences
    tokens, rows = lax.map(jax.checkpoint(tile), jnp.arange(num_tiles))
    out = jnp.zeros((num_tokens, heads, rows.shape[-1]), jnp.float32)
    return out.at[tokens.reshape(-1)].set(rows.reshape(-1, *rows.shape[2:]), mode="drop")


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def attend_differentiably(
    attend: Any, scale: float, softcap: float | None,
    q: jax.Array, k_layer: jax.Array, v_layer: jax.Array, batch: AttentionBatch, window: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """What ``attend`` computes, with the derivative of `attend_by_tiles`."""
    return attend(q, k_layer, v_layer, batch, scale=scale, window=window, softcap=softcap)


@attend_differentiably.defjvp
def _jvp(
    attend: Any, scale: float, softcap: float | None, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    *arrays, batch, window = primals
    again = partial(attend_by_tiles, batch=batch, scale=scale, window=window, softcap=softcap)
    _, tangent = jax.jvp(again, tuple(arrays), tangents[:3])
    return attend_differentiably(attend, scale, softcap, *primals), tangent


def _context(layer: jax.Array, blocks: jax.Array) -> jax.Array:
    """``[kv_heads, max_blocks * block_size, head_dim]`` float32."""
    context = jnp.moveaxis(layer[blocks].astype(jnp.float32), 1, 0)
    return context.reshape(context.shape[0], -1, context.shape[-1])
