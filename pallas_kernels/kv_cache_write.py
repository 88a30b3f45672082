"""Writing a step's keys and values into their slots of the paged cache, in place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pallas_kernels.kv_tiles import power_of_two
from pallas_kernels.tuning import WriteTiles


def kv_cache_write(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    *,
    tiles: WriteTiles,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """The caches with new keys and values in their slots; `reference.kv_cache_write` in Pallas.

    Values that are not finite are clamped. With scales the cache is quantised, symmetric, one scale for each token and
    head.

    Args:
        k_cache, v_cache: ``[num_blocks, kv_heads, block_size, head_dim]`` float32, bfloat16 or float16; with scales
            int8 or float8_e4m3fn. Donated.
        k, v: ``[T, kv_heads, head_dim]`` float32, bfloat16 or float16.
        slots: ``[T]`` int32, ``block * block_size + offset``; at or past the last slot for tokens to leave out.
        k_scales, v_scales: ``[num_blocks, kv_heads, block_size]`` float32, or None. Donated.
        tiles: sizes, see `tuning`.
        interpret: run on any device, slowly.

    Returns:
        Both caches and both scales.
    """
    caches = [array for array in (k_cache, v_cache, k_scales, v_scales) if array is not None]
    call = pl.pallas_call(
        partial(_kernel, tiles=tiles),
        out_shape=[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches],
        grid=(pl.cdiv(k.shape[0], tiles.tokens), k.shape[1]),
        input_output_aliases={3 + i: i for i in range(len(caches))},
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="kv_cache_write",
    )
    written = call(k, v, slots, *caches)
    return (*written, None, None) if k_scales is None else tuple(written)


def _kernel(k_ref: Any, v_ref: Any, slots_ref: Any, *caches: Any, tiles: WriteTiles) -> None:
    """Some tokens of one KV head."""
    outputs = caches[len(caches) // 2 :]  # the inputs before them are the same memory
    num_tokens, _, head_dim = k_ref.shape
    num_blocks, _, block_size, _ = outputs[0].shape
    head = pl.program_id(1)
    token = pl.program_id(0) * tiles.tokens + lax.iota(jnp.int32, tiles.tokens)
    slot = plgpu.load(slots_ref.at[token], mask=token < num_tokens, other=num_blocks * block_size)
    is_written = slot < num_blocks * block_size
    # In interpret mode a masked store needs an index outside, or it would put the old value over a new one.
    block, offset = jnp.where(is_written, slot // block_size, num_blocks), slot % block_size
    channel = lax.iota(jnp.int32, power_of_two(head_dim))[None, :]
    mask = is_written[:, None] & (channel < head_dim)
    for index, ref in enumerate((k_ref, v_ref)):
        out_ref = outputs[index]
        new = plgpu.load(ref.at[token[:, None], head, channel], mask=mask, other=jnp.zeros((), ref.dtype))
        new = _finite(new.astype(jnp.float32), jnp.float32 if len(outputs) > 2 else out_ref.dtype)
        if len(outputs) > 2:
            new, scale = _quantize(new, out_ref.dtype)
            plgpu.store(outputs[2 + index].at[block, head, offset], scale, mask=is_written)
        target = out_ref.at[block[:, None], head, offset[:, None], channel]
        plgpu.store(target, new.astype(out_ref.dtype), mask=mask)


def _quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x), axis=1) / largest
    scaled = x / jnp.where(scale > 0, scale, 1.0)[:, None]
    scaled = jnp.minimum(jnp.maximum(scaled, -largest), largest)
    return (jnp.floor(scaled + 0.5) if dtype == jnp.int8 else scaled), scale


def _finite(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """NaN becomes 0, and what the dtype can't hold its largest value."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.minimum(jnp.maximum(jnp.where(x == x, x, 0.0), -largest), largest)
