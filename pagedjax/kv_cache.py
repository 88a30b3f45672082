"""The paged KV cache on the device: allocation, and writing a step's tokens into their slots."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pagedjax.config import ModelConfig, UserError

# Pallas/Triton computes element offsets in int32 for arrays under 4 GiB, so no single array may hold more elements.
MAX_ARRAY_ELEMENTS = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Every layer's keys and values, and the token that stands in each slot. Donated to each step.

    Attributes:
        k: stacks of places, ``[places, num_blocks, kv_heads, block_size, head_dim]`` each, one head's block contiguous;
            a single stack unless it would pass 2^31 elements. A block belongs to one cache group, whose layers have a
            place in it each (``CacheLayout``).
        v: as ``k``.
        token_ids: ``[num_blocks, block_size]`` int32. Penalties read a sequence's history here through its block
            table, so it follows blocks wherever they go and needs no copy of its own.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    token_ids: jax.Array

    @property
    def num_blocks(self) -> int:
        """Physical blocks."""
        return self.token_ids.shape[0]

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.token_ids.shape[1]


def block_bytes(config: ModelConfig, block_size: int, dtype: DTypeLike) -> int:
    """Bytes that one block takes in all its places, its token ids included."""
    elements = 2 * config.cache_layout.depth * config.num_kv_heads * config.head_dim
    return block_size * (elements * jnp.dtype(dtype).itemsize + 4)


def init_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: DTypeLike | None = None
) -> KVCache:
    """An empty cache of ``num_blocks`` blocks for ``config``'s layers, on the default device.

    ``dtype`` is the weights' unless it is given.

    Raises:
        UserError: one place's array would pass 2^31 elements.
    """
    dtype = dtype or config.dtype
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    elements = math.prod(shape)
    if elements > MAX_ARRAY_ELEMENTS:
        most = MAX_ARRAY_ELEMENTS // (elements // num_blocks)
        raise UserError(f"{num_blocks} blocks pass 2^31 elements in one layer's cache: use --num-kv-blocks {most}")
    most, depth = MAX_ARRAY_ELEMENTS // elements, config.cache_layout.depth
    stacks = [min(most, depth - first) for first in range(0, depth, most)]
    return KVCache(
        k=tuple(jnp.zeros((places, *shape), dtype) for places in stacks),
        v=tuple(jnp.zeros((places, *shape), dtype) for places in stacks),
        token_ids=jnp.zeros((num_blocks, block_size), jnp.int32),
    )


def copy_blocks(kv_cache: KVCache, copies: jax.Array, num_copies: jax.Array) -> KVCache:
    """The cache after copying whole blocks, in every place, one after the other.

    A loop with a traced trip count: a step without copies pays for none.

    Args:
        kv_cache: donate it.
        copies: ``[C, 2]`` int32 blocks, from and to.
        num_copies: int32 scalar; the first so many count.
    """

    def copy(i: jax.Array, cache: KVCache) -> KVCache:
        source, target = copies[i, 0], copies[i, 1]

        def move(array: jax.Array, axis: int) -> jax.Array:
            block = lax.dynamic_slice_in_dim(array, source, 1, axis)
            return lax.dynamic_update_slice_in_dim(array, block, target, axis)

        return KVCache(
            k=tuple(move(stack, 1) for stack in cache.k),
            v=tuple(move(stack, 1) for stack in cache.v),
            token_ids=move(cache.token_ids, 0),
        )

    return lax.fori_loop(0, num_copies, copy, kv_cache)


def write_kv(
    k_layer: jax.Array, v_layer: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cache of a layer, or of a stack of layers, with the step's keys and values in their slots.

    Values that are not finite are clamped: a block outlives its sequence, and a masked slot still meets a weight of
    zero in attention, where zero times NaN would reach a stranger's result.

    Args:
        k_layer, v_layer: ``[num_blocks, kv_heads, block_size, head_dim]``.
        k, v: ``[T, kv_heads, head_dim]``.
        slots: ``[T]`` int32, ``block * block_size + offset``; one past the last slot for padding, which is dropped.
            (An index of -1 would wrap and overwrite the last slot.)
    """
    block_size = k_layer.shape[2]
    block, offset = slots // block_size, slots % block_size

    def write(layer: jax.Array, new: jax.Array) -> jax.Array:
        # Clipped before the cast: the largest float32 becomes infinite in bfloat16.
        largest = float(jnp.finfo(layer.dtype).max)
        finite = jnp.clip(jnp.nan_to_num(new.astype(jnp.float32), posinf=largest, neginf=-largest), -largest, largest)
        return layer.at[block, :, offset].set(finite.astype(layer.dtype), mode="drop")

    return write(k_layer, k), write(v_layer, v)
