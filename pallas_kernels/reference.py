"""What each kernel computes, in plain `jax.numpy` and float32: the specification that its tests compare it with.

Memory is of no concern here: every token gets its own copy of its sequence's context.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

HIGHEST = lax.Precision.HIGHEST


def ragged_paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
) -> jax.Array:
    """See `ragged_paged_attention.ragged_paged_attention`. Returns ``[T, heads, head_dim]`` float32."""
    num_tokens, heads, head_dim = q.shape
    num_sequences, kv_heads = kv_lens.shape[0], k_cache.shape[1]
    token = jnp.arange(num_tokens)
    owner = jnp.searchsorted(cu_q_lens, token, side="right") - 1
    is_row = owner < num_sequences
    owner = jnp.where(is_row, owner, 0)
    position = jnp.where(is_row, kv_lens[owner] - cu_q_lens[owner + 1] + token, -1)

    k = _context(k_cache, k_scales, block_tables)[owner]
    v = _context(v_cache, v_scales, block_tables)[owner]
    grouped = q.astype(jnp.float32).reshape(num_tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("thgd,thcd->thgc", grouped, k, precision=HIGHEST) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    at = jnp.arange(k.shape[2])
    seen = at <= position[:, None]
    if window is not None:
        seen &= at > position[:, None] - window
    seen = seen[:, None, None]
    logits = None if sinks is None else sinks.reshape(1, kv_heads, -1, 1)
    greatest = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-1e30)
    if logits is not None:
        greatest = jnp.maximum(greatest, logits)
    # The weight of what is not seen is 0 and not a small number, and so is its derivative.
    p = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0) - jnp.where(seen, greatest, 0.0)), 0.0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if logits is not None:
        total += jnp.exp(logits - greatest)
    out = jnp.einsum("thgc,thcd->thgd", p, v, precision=HIGHEST) / jnp.where(total > 0, total, 1.0)
    return out.reshape(q.shape)


def paged_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
) -> jax.Array:
    """One query per sequence, ``[S, heads, head_dim]``; see `paged_decode.paged_decode`. Returns float32."""
    return ragged_paged_attention(
        q, k_cache, v_cache, block_tables, jnp.arange(kv_lens.shape[0] + 1), kv_lens, scale=scale, window=window,
        softcap=softcap, sinks=sinks, k_scales=k_scales, v_scales=v_scales,
    )  # fmt: skip


def reduce_segments(acc: jax.Array, m: jax.Array, l: jax.Array) -> jax.Array:
    """Put together what the segments of a context gave.

    Args:
        acc: ``[N, segments, head_dim]`` float32, sums weighted by values.
        m, l: ``[N, segments]`` float32, greatest score in base two and sum; a segment that saw nothing has sum 0.

    Returns:
        ``[N, head_dim]`` float32; 0 where no segment saw anything.
    """
    weight = jnp.exp2(m - jnp.max(m, axis=1, keepdims=True)) * (l > 0)
    total = jnp.sum(weight * l, axis=1)[:, None]
    return jnp.sum(weight[..., None] * acc, axis=1) / jnp.where(total > 0, total, 1.0)


def kv_cache_write(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """See `kv_cache_write.kv_cache_write`."""
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size

    def write(cache: jax.Array, scales: jax.Array | None, new: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        stored, scale = quantize(new, cache.dtype) if scales is not None else (_finite(new, cache.dtype), None)
        cache = cache.at[block, :, offset].set(stored.astype(cache.dtype), mode="drop")
        if scales is not None:
            scales = scales.at[block, :, offset].set(scale, mode="drop")
        return cache, scales

    k_cache, k_scales = write(k_cache, k_scales, k)
    v_cache, v_scales = write(v_cache, v_scales, v)
    return k_cache, v_cache, k_scales, v_scales


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The last axis as int8 or float8_e4m3fn, symmetric, and its scale: ``x`` is about ``q * scale[..., None]``.

    The scale of a vector of zeros is 0.
    """
    x, dtype = _finite(x, jnp.float32), jnp.dtype(dtype)
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    scaled = jnp.clip(x / jnp.where(scale > 0, scale, 1.0)[..., None], -largest, largest)
    return (jnp.floor(scaled + 0.5) if dtype == jnp.int8 else scaled).astype(dtype), scale


def quant_matmul(x: jax.Array, w: jax.Array, scales: jax.Array, x_scales: jax.Array | None = None) -> jax.Array:
    """``x @ w`` with quantised weights; see `quant_matmul.quant_matmul`. Returns ``[M, N]`` float32."""
    rows = x.astype(jnp.float32)
    if x_scales is not None:
        rows *= x_scales[:, None]
    groups = scales.shape[0]
    weights = unpack_int4(w, groups) if w.dtype == jnp.uint8 else w if x_scales is None else w.T
    weights = weights.astype(jnp.float32).reshape(groups, -1, weights.shape[1]) * scales[:, None]
    return jnp.dot(rows, weights.reshape(x.shape[1], -1), precision=HIGHEST)


def pack_int4(w: jax.Array, groups: int) -> jax.Array:
    """``[K // 2, N]`` uint8 of ``[K, N]`` integers from -8 to 7.

    In each of the groups along K, byte ``i`` holds row ``i`` in its low half and row ``i + size / 2`` in its high half,
    both with 8 added.
    """
    _, columns = w.shape
    low, high = jnp.split((w + 8).astype(jnp.uint8).reshape(groups, -1, columns), 2, axis=1)
    return (low | (high << 4)).reshape(-1, columns)


def unpack_int4(packed: jax.Array, groups: int) -> jax.Array:
    """``[K, N]`` int8, the inverse of `pack_int4`."""
    _, columns = packed.shape
    halves = packed.reshape(groups, -1, columns)
    both = jnp.concatenate([halves & 15, halves >> 4], axis=1)
    return both.reshape(-1, columns).astype(jnp.int8) - 8


def _context(cache: jax.Array, scales: jax.Array | None, block_tables: jax.Array) -> jax.Array:
    """``[S, kv_heads, max_blocks * block_size, head_dim]`` float32."""
    context = cache[block_tables].astype(jnp.float32)
    if scales is not None:
        context *= scales[block_tables][..., None]
    sequences, blocks, kv_heads, block_size, head_dim = context.shape
    return jnp.moveaxis(context, 2, 1).reshape(sequences, kv_heads, blocks * block_size, head_dim)


def _finite(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What is not finite, clamped: a masked slot still meets a weight of zero, and zero times NaN is NaN."""
    largest, x = float(jnp.finfo(dtype).max), x.astype(jnp.float32)
    return jnp.clip(jnp.nan_to_num(x, posinf=largest, neginf=-largest), -largest, largest)
