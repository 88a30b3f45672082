"""Products with quantised weights, dequantised tile by tile on their way into the tensor cores."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tuning import MatmulTiles


def quant_matmul(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    x_scales: jax.Array | None = None,
    *,
    tiles: MatmulTiles,
    interpret: bool = False,
) -> jax.Array:
    """``x @ w`` accumulated in float32; `reference.quant_matmul` in Pallas.

    - W8A16: ``w`` int8 or float8_e4m3fn, ``x`` bfloat16 or float16.
    - W4A16: ``w`` uint8, two rows in a byte (`reference.pack_int4`), ``x`` bfloat16 or float16.
    - W8A8: ``x`` of w's dtype, int8 or float8_e4m3fn, with ``x_scales``; the product runs in that dtype, and ``w``
      lies transposed, since tensor cores take 8-bit numbers along K only.

    Args:
        x: ``[M, K]``.
        w: ``[K, N]``, or ``[K / 2, N]`` of pairs, or ``[N, K]`` for W8A8.
        scales: ``[groups, N]`` float32; a group is K / groups rows of weights, a multiple of ``tiles.inner``, or of
            twice that for pairs.
        x_scales: ``[M]`` float32, of quantised rows.
        tiles: sizes, see `tuning`.
        interpret: run on any device, slowly.

    Returns:
        ``[M, N]`` float32.

    Raises:
        ValueError: the tiles do not fit the groups.
    """
    rows, columns = x.shape[0], scales.shape[1]
    step = tiles.inner * (2 if w.dtype == jnp.uint8 else 1)
    size, rest = divmod(x.shape[1], scales.shape[0])
    if rest or size % step:
        raise ValueError(
            f"scales: {scales.shape[0]} groups of {x.shape[1]} rows of weights are no multiples of {step} rows each"
        )
    call = pl.pallas_call(
        partial(_kernel, tiles=tiles, num_steps=x.shape[1] // step, steps_per_group=size // step),
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(columns, tiles.columns)),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="quant_matmul",
    )
    return call(x, w, scales, x_scales)


def _kernel(
    x_ref: Any, w_ref: Any, scales_ref: Any, x_scales_ref: Any, out_ref: Any,
    *, tiles: MatmulTiles, num_steps: int, steps_per_group: int,
) -> None:  # fmt: skip
    """One tile of the result."""
    (num_rows, _), num_columns = x_ref.shape, scales_ref.shape[1]
    row = pl.program_id(0) * tiles.rows + lax.iota(jnp.int32, tiles.rows)
    column = pl.program_id(1) * tiles.columns + lax.iota(jnp.int32, tiles.columns)
    inner = lax.iota(jnp.int32, tiles.inner)
    is_pairs = w_ref.dtype == jnp.uint8
    groups = num_steps // steps_per_group

    def load_x(first: jax.Array) -> jax.Array:
        ref = x_ref.at[row[:, None], (first + inner)[None, :]]
        mask = jnp.broadcast_to((row < num_rows)[:, None], (tiles.rows, tiles.inner))
        return plgpu.load(ref, mask=mask, other=jnp.zeros((), x_ref.dtype))

    def load_w(first: jax.Array) -> jax.Array:
        if x_scales_ref is not None:
            ref = w_ref.at[column[:, None], (first + inner)[None, :]]
            mask = jnp.broadcast_to((column < num_columns)[:, None], (tiles.columns, tiles.inner))
        else:
            ref = w_ref.at[(first + inner)[:, None], column[None, :]]
            mask = jnp.broadcast_to((column < num_columns)[None, :], (tiles.inner, tiles.columns))
        return plgpu.load(ref, mask=mask, other=jnp.zeros((), w_ref.dtype))

    def load_scale(group: jax.Array | int) -> jax.Array:
        return plgpu.load(scales_ref.at[group, column], mask=column < num_columns, other=0.0)

    def product(number: jax.Array) -> jax.Array:
        if not is_pairs:
            x, w = load_x(number * tiles.inner), load_w(number * tiles.inner)
            return plgpu.dot(x, w, trans_b=True) if x_scales_ref is not None else plgpu.dot(x, w.astype(x_ref.dtype))
        # A group's first half is in the low halves of its bytes, and its second half in the high ones.
        group, at = lax.div(number, steps_per_group), lax.rem(number, steps_per_group)
        low = (group * 2 * steps_per_group + at) * tiles.inner
        packed = load_w(number * tiles.inner).astype(jnp.int32)
        weights = ((packed & 15) - 8, (packed >> 4) - 8)
        firsts = (low, low + steps_per_group * tiles.inner)
        return sum(
            plgpu.dot(load_x(first), half.astype(x_ref.dtype)) for first, half in zip(firsts, weights, strict=True)
        )

    def add(number: jax.Array, acc: jax.Array) -> jax.Array:
        part = product(number)
        if groups > 1:
            part = part.astype(jnp.float32) * load_scale(lax.div(number, steps_per_group))[None, :]
        return acc + part

    is_integer = x_ref.dtype == jnp.int8 and groups == 1
    start = jnp.zeros((tiles.rows, tiles.columns), jnp.int32 if is_integer else jnp.float32)
    result = lax.fori_loop(0, num_steps, add, start).astype(jnp.float32)
    if groups == 1:
        result *= load_scale(0)[None, :]
    if x_scales_ref is not None:
        result *= plgpu.load(x_scales_ref.at[row], mask=row < num_rows, other=0.0)[:, None]
    is_row = row < num_rows
    at = (jnp.where(is_row, row, num_rows)[:, None], jnp.where(column < num_columns, column, num_columns)[None, :])
    plgpu.store(out_ref.at[at], result, mask=is_row[:, None] & (column < num_columns)[None, :])
