"""The paged KV cache on the device: allocation, and writing a step's tokens into their slots."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pagedjax.config import ModelConfig, UserError

# Pallas/Triton computes element offsets in int32 for arrays under 4 GiB, so no single array may hold more elements.
MAX_ARRAY_ELEMENTS = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Every layer's keys and values, and the token that stands in each slot. Donated to each step.

    Attributes:
        k: stacks of layers, ``[layers, num_blocks, kv_heads, block_size, head_dim]`` each, one head's block contiguous;
            a single stack unless it would pass 2^31 elements.
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
    """Bytes that one block takes over all layers, its token ids included."""
    return block_size * (config.kv_token_elements * jnp.dtype(dtype).itemsize + 4)


def init_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int = 16, dtype: DTypeLike | None = None
) -> KVCache:
    """An empty cache of ``num_blocks`` blocks for ``config``'s layers, on the default device.

    ``dtype`` is the weights' unless it is given.

    Raises:
        UserError: one layer's array would pass 2^31 elements.
    """
    dtype = dtype or config.dtype
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    elements = math.prod(shape)
    if elements > MAX_ARRAY_ELEMENTS:
        most = MAX_ARRAY_ELEMENTS // (elements // num_blocks)
        raise UserError(f"{num_blocks} blocks pass 2^31 elements in one layer's cache: use --num-kv-blocks {most}")
    most_layers = MAX_ARRAY_ELEMENTS // elements
    stacks = [min(most_layers, config.num_layers - first) for first in range(0, config.num_layers, most_layers)]
    return KVCache(
        k=tuple(jnp.zeros((layers, *shape), dtype) for layers in stacks),
        v=tuple(jnp.zeros((layers, *shape), dtype) for layers in stacks),
        token_ids=jnp.zeros((num_blocks, block_size), jnp.int32),
    )


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
        finite = jnp.clip(jnp.nan_to_num(new, posinf=largest, neginf=-largest), -largest, largest)
        return layer.at[block, :, offset].set(finite.astype(layer.dtype), mode="drop")

    return write(k_layer, k), write(v_layer, v)
