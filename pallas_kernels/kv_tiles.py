"""What the attention kernels share: tiles of cached keys and values, and the softmax that runs over them.

Everything here is traced inside a kernel. A tile is ``size`` consecutive tokens of one sequence and one KV head, read
in place through the block table. Blocks lie ``[num_blocks, kv_heads, block_size, head_dim]``.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

LOG2_E = math.log2(math.e)
MASKED = -1e30  # finite, so that a row with nothing to see gives no NaN


def power_of_two(n: int) -> int:
    """The least power of two that is not below ``n``: Triton's tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


class Softmax(NamedTuple):
    """An online softmax over M rows: the greatest score so far, in base two; the sum; and the sum weighted by values.

    ``m``, ``l`` are ``[M]``, ``acc`` is ``[M, D]``, all float32.
    """

    m: jax.Array
    l: jax.Array
    acc: jax.Array


@dataclass(frozen=True)
class KVTiles:
    """The tiles of one sequence and one KV head.

    Attributes:
        k, v: references to the caches.
        k_scales, v_scales: references to ``[num_blocks, kv_heads, block_size]`` float32, or None.
        block_tables: reference, ``[S, max_blocks]`` int32.
        sequence, kv_head: int32 scalars.
        size: tokens in a tile, a power of two.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    block_tables: Any
    sequence: jax.Array
    kv_head: jax.Array
    size: int

    @property
    def _block_size(self) -> int:
        return int(self.k.shape[2])

    @property
    def _block_bits(self) -> int:
        return self._block_size.bit_length() - 1

    def blocks(self, number: jax.Array) -> jax.Array:
        """Physical blocks of a tile: ``[size]``, or a scalar where a tile lies in one block.

        A loop carries them for its next tile. Were they loaded in the iteration that needs them, Triton's pipeliner
        would leave the loads of keys and values in a single buffer.
        """
        first = number * self.size
        column = (first if self.size <= self._block_size else self.tokens(number)) >> self._block_bits
        # Past the end there is nothing to load, for the tile after the last one is asked for as well.
        last = self.block_tables.shape[1] - 1
        return plgpu.load(self.block_tables.at[self.sequence, jnp.minimum(column, last)])

    def tokens(self, number: jax.Array) -> jax.Array:
        """``[size]`` positions of a tile's tokens in their sequence."""
        return number * self.size + lax.iota(jnp.int32, self.size)

    def load(self, cache: Any, blocks: jax.Array, number: jax.Array, seen: jax.Array | None) -> jax.Array:
        """``[size, D]`` of ``cache``, D a power of two; zero past the head dimension and where not ``seen``."""
        head_dim = cache.shape[3]
        width = power_of_two(head_dim)
        channel = lax.iota(jnp.int32, width)[None, :]
        offset = self.tokens(number) & (self._block_size - 1)
        block = blocks[:, None] if blocks.ndim else blocks
        mask = None if width == head_dim else channel < head_dim
        if seen is not None:
            mask = seen[:, None] if mask is None else mask & seen[:, None]
        ref = cache.at[block, self.kv_head, offset[:, None], channel]
        if mask is None:
            return plgpu.load(ref)
        return plgpu.load(ref, mask=jnp.broadcast_to(mask, (self.size, width)), other=jnp.zeros((), cache.dtype))

    def load_scales(self, scales: Any, blocks: jax.Array, number: jax.Array, seen: jax.Array | None) -> jax.Array:
        """``[size]`` of a cache's scales."""
        ref = scales.at[blocks, self.kv_head, self.tokens(number) & (self._block_size - 1)]
        return plgpu.load(ref) if seen is None else plgpu.load(ref, mask=seen, other=0.0)


def empty_softmax(rows: int, width: int, sinks: jax.Array | None) -> Softmax:
    """Nothing seen yet, but for a sink's logit, which takes its share of the sum and gives nothing.

    Args:
        sinks: ``[rows]`` float32 logits, or None.
    """
    acc = jnp.zeros((rows, width), jnp.float32)
    if sinks is None:
        return Softmax(jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), acc)
    return Softmax(sinks * LOG2_E, jnp.ones(rows, jnp.float32), acc)


def attend_tile(
    softmax: Softmax,
    q: jax.Array,
    tiles: KVTiles,
    blocks: jax.Array,
    number: jax.Array,
    *,
    mask: jax.Array | None,
    loaded: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> Softmax:
    """The softmax after one more tile.

    Args:
        q: ``[M, D]`` queries.
        blocks, number: the tile.
        mask: ``[M, size]`` what each query sees, or None for all of it.
        loaded: ``[size]`` tokens to read, or None for all of them.
        scale: factor of the scores, above zero.
        softcap: scores become ``softcap * tanh(score / softcap)``.
    """
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    k = tiles.load(tiles.k, blocks, number, loaded).astype(q.dtype)
    scores = plgpu.dot(q, k, trans_b=True, precision=precision)
    factor = scale * LOG2_E
    if tiles.k_scales is not None:
        scores *= tiles.load_scales(tiles.k_scales, blocks, number, loaded)[None, :]
    if softcap is not None:
        scores, factor = softcap * _tanh(scores * (scale / softcap)), LOG2_E
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
    m = jnp.maximum(softmax.m, jnp.max(scores, axis=1) * factor)
    p = jnp.exp2(scores * factor - m[:, None])
    if mask is not None:
        p = jnp.where(mask, p, 0.0)
    decay = jnp.exp2(softmax.m - m)
    l = softmax.l * decay + jnp.sum(p, axis=1)
    if tiles.v_scales is not None:
        p *= tiles.load_scales(tiles.v_scales, blocks, number, loaded)[None, :]
    v = tiles.load(tiles.v, blocks, number, loaded).astype(q.dtype)
    acc = softmax.acc * decay[:, None] + plgpu.dot(p.astype(q.dtype), v, precision=precision)
    return Softmax(m, l, acc)


def _tanh(x: jax.Array) -> jax.Array:
    """By the one fast exponential there is; its error is absolute, some 1e-7, which a score can bear."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2_E)) + 1.0)
