"""The content of the swap space: blocks in host memory, and the programs that take them off the device and put them
back."""

import itertools
from collections.abc import Sequence as ListLike
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.kv_cache import KVCache
from pagedjax.swap_space import Transfer

# Blocks that one run of a program moves; fewer are padded, so that there is one shape.
_CHUNK = 16


class SwapStore:
    """Host memory for ``num_slots`` blocks of a cache.

    Args:
        num_slots: blocks of room, allocated at once.
        cache: shapes and dtypes of the cache.
    """

    def __init__(self, num_slots: int, cache: KVCache):
        def host(stack: jax.Array) -> Any:  # NumPy arrays stand in for device arrays
            return np.zeros((stack.shape[0], num_slots, *stack.shape[2:]), stack.dtype)

        token_ids: Any = np.zeros((num_slots, cache.block_size), np.int32)
        self._cache = cache
        self._host = KVCache(tuple(map(host, cache.k)), tuple(map(host, cache.v)), token_ids)
        self._arriving: list[tuple[KVCache, list[int]]] = []  # on their way from the device, and their slots
        self._take: Any = None
        self._put: Any = None

    @property
    def num_compiled(self) -> int:
        """Programs that are compiled."""
        return (self._take is not None) + (self._put is not None)

    def warm_up(self) -> None:
        """Compile both programs."""
        blocks = jax.ShapeDtypeStruct((_CHUNK,), jnp.int32)
        content = jax.eval_shape(take_blocks, self._cache, blocks)
        self._take = jax.jit(take_blocks).lower(self._cache, blocks).compile()
        self._put = jax.jit(put_blocks, donate_argnums=0).lower(self._cache, blocks, content).compile()

    def move(self, kv_cache: KVCache, transfers: ListLike[Transfer]) -> KVCache:
        """Make the transfers in their order.

        Taking blocks off the device is only begun: their bytes are looked at when somebody wants them back, or when
        the next ones follow.
        """
        self._settle()
        for out, group in itertools.groupby(transfers, key=attrgetter("out")):
            for chunk in itertools.batched(group, _CHUNK):
                if out:
                    content = self._take(kv_cache, self._padded(chunk, 0))
                    jax.tree.map(lambda array: array.copy_to_host_async(), content)
                    self._arriving.append((content, [transfer.slot for transfer in chunk]))
                else:
                    self._settle()
                    slots = np.zeros(_CHUNK, np.int32)
                    slots[: len(chunk)] = [transfer.slot for transfer in chunk]
                    content = _at(self._host, slots)
                    kv_cache = self._put(kv_cache, self._padded(chunk, kv_cache.num_blocks), content)
        return kv_cache

    def _settle(self) -> None:
        """Put what has arrived from the device into its slots."""
        for content, slots in self._arriving:
            count = len(slots)
            for host, device in zip((*self._host.k, *self._host.v), (*content.k, *content.v), strict=True):
                np.asarray(host)[:, slots] = np.asarray(device)[:, :count]
            np.asarray(self._host.token_ids)[slots] = np.asarray(content.token_ids)[:count]
        self._arriving.clear()

    @staticmethod
    def _padded(chunk: ListLike[Transfer], padding: int) -> np.ndarray:
        blocks = np.full(_CHUNK, padding, np.int32)
        blocks[: len(chunk)] = [transfer.block for transfer in chunk]
        return blocks


def _at(cache: KVCache, blocks: Any) -> KVCache:
    return KVCache(tuple(k[:, blocks] for k in cache.k), tuple(v[:, blocks] for v in cache.v), cache.token_ids[blocks])


def take_blocks(kv_cache: KVCache, blocks: jax.Array) -> KVCache:
    """The content of ``blocks`` ``[N]``: a cache of N blocks."""
    return _at(kv_cache, blocks)


def put_blocks(kv_cache: KVCache, blocks: jax.Array, content: KVCache) -> KVCache:
    """The cache with ``content``, a cache of N blocks, in ``blocks`` ``[N]``; a block past the last is dropped."""

    def put(stack: jax.Array, new: jax.Array) -> jax.Array:
        return stack.at[:, blocks].set(new, mode="drop")

    return KVCache(
        k=tuple(map(put, kv_cache.k, content.k)),
        v=tuple(map(put, kv_cache.v, content.v)),
        token_ids=kv_cache.token_ids.at[blocks].set(content.token_ids, mode="drop"),
    )
