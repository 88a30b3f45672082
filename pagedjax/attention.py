"""Attention over the paged cache: which backend computes it, and which one writes the cache.

``xla`` is plain JAX, for CPUs; ``pallas`` are the kernels for GPUs; ``pallas-interpret`` runs these on any device, for
tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.attention_batch import AttentionBatch
from pagedjax.attention_gradient import attend_differentiably
from pagedjax.kv_cache import write_kv
from pagedjax.xla_attention import paged_attention_xla
from pallas_kernels.kv_cache_write import kv_cache_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.tuning import decode_tiles, prefill_tiles, write_tiles


@dataclass(frozen=True)
class AttentionBackend:
    """Reads and writes one layer's cache in place.

    Attributes:
        write: as `kv_cache.write_kv`.
        attend: as `paged_attention_xla`.
    """

    write: Callable[..., tuple[jax.Array, jax.Array]]
    attend: Callable[..., jax.Array]

    def __call__(
        self,
        q: jax.Array,
        k_layer: jax.Array,
        v_layer: jax.Array,
        batch: AttentionBatch,
        *,
        scale: float,
        window: jax.Array | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """Causal attention of each query over its sequence's cached context, softmax in float32. Differentiable.

        Args:
            q: ``[T, heads, head_dim]`` float32.
            k_layer, v_layer: ``[num_blocks, kv_heads, block_size, head_dim]``, this step's tokens already written.
            batch: the step's sequences.
            scale: factor of the scores.
            window: int32 scalar, a query sees this many tokens, itself included; None for all.
            softcap: scores become ``softcap * tanh(score / softcap)``.

        Returns:
            ``[T, heads, head_dim]`` float32; rows of padding are unspecified but finite.
        """
        return attend_differentiably(self.attend, scale, softcap, q, k_layer, v_layer, batch, window)


def attention_backend(name: str) -> AttentionBackend:
    """The backend of this name.

    Raises:
        KeyError: there is none.
    """
    return _BACKENDS[name]


@partial(jax.jit, static_argnames=("scale", "softcap", "interpret"))
def _attend_pallas(
    q: jax.Array,
    k_layer: jax.Array,
    v_layer: jax.Array,
    batch: AttentionBatch,
    *,
    scale: float,
    window: jax.Array | None,
    softcap: float | None,
    interpret: bool,
) -> jax.Array:
    """Decode rows by `paged_decode`, the others by `ragged_paged_attention`, into one array."""
    arch = gpu_architecture()
    num_tokens, heads, head_dim = q.shape
    kv_heads, block_size = k_layer.shape[1:3]
    max_context = batch.block_tables.shape[1] * block_size
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "interpret": interpret}
    q = q.astype(k_layer.dtype)
    out = ragged_paged_attention(
        q, k_layer, v_layer, batch.block_tables, batch.cu_q_lens, batch.kv_lens, batch.num_decodes,
        tiles=prefill_tiles(arch, head_dim, heads // kv_heads, k_layer.dtype), **options,
    )  # fmt: skip
    rows = min(num_tokens, batch.kv_lens.shape[0])
    lens = jnp.where(jnp.arange(rows) < batch.num_decodes, batch.kv_lens[:rows], 0)
    tiles = decode_tiles(arch, head_dim, k_layer.dtype, rows, kv_heads, max_context)
    out = paged_decode(q, k_layer, v_layer, batch.block_tables[:rows], lens, out=out, tiles=tiles, **options)
    return out.astype(jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(5,))
def _write_pallas(
    k_layer: jax.Array, v_layer: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    written = kv_cache_write(k_layer, v_layer, k, v, slots, tiles=write_tiles(k.shape[2]), interpret=interpret)
    return written[0], written[1]


@_write_pallas.defjvp
def _(
    interpret: bool, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    k_layer, v_layer, k, v, slots = primals
    _, tangent = jax.jvp(partial(write_kv, slots=slots), (k_layer, v_layer, k, v), tangents[:4])
    return _write_pallas(*primals, interpret), tangent


def gpu_architecture() -> str:
    """The entry of the kernels' tables for the default device: ``sm_80``, or ``sm_90`` for what came after."""
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    return "sm_80" if float(capability) < 9 else "sm_90"


_BACKENDS = {"xla": AttentionBackend(write_kv, paged_attention_xla)} | {
    name: AttentionBackend(partial(_write_pallas, interpret=interpret), partial(_attend_pallas, interpret=interpret))
    for name, interpret in (("pallas", False), ("pallas-interpret", True))
}
