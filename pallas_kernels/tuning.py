"""How each kernel is cut into tiles, by architecture: a frozen table, of which every entry compiles without a spill.

Chosen by compiling without a GPU (`python -m pallas_kernels.compile`): the largest tiles whose registers suffice, that
leave keys and values at least double-buffered, and that use the best tensor-core instruction there is.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.kv_tiles import power_of_two

NUM_SMS = {"sm_80": 108, "sm_90": 132}  # A100; H100 and H200


@dataclass(frozen=True)
class PrefillTiles:
    """Of `ragged_paged_attention`: query tokens, and context tokens of an iteration, powers of two."""

    queries: int
    tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeTiles:
    """Of `paged_decode`: context tokens of an iteration, a power of two, and programs that share a context."""

    tokens: int
    segments: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class WriteTiles:
    """Of `kv_cache_write`: tokens, a power of two."""

    tokens: int
    num_warps: int


@dataclass(frozen=True)
class MatmulTiles:
    """Of `quant_matmul`: rows and columns of the result, and rows of stored weights of an iteration; powers of two."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# By architecture, head dimension rounded up to a power of two, and bytes of a cached number: rows of the tile (query
# tokens times the heads that share a KV head), context tokens, warps, stages.
_PREFILL = {
    ("sm_80", 64, 2): (128, 64, 8, 3),
    ("sm_80", 64, 1): (128, 64, 8, 3),
    ("sm_80", 128, 2): (128, 64, 8, 3),
    ("sm_80", 128, 1): (128, 64, 8, 3),
    ("sm_80", 256, 2): (64, 32, 8, 3),
    ("sm_80", 256, 1): (64, 16, 8, 3),
    ("sm_90", 64, 2): (128, 64, 8, 3),
    ("sm_90", 64, 1): (128, 64, 8, 3),
    ("sm_90", 128, 2): (128, 64, 8, 3),
    ("sm_90", 128, 1): (128, 64, 8, 3),
    ("sm_90", 256, 2): (128, 32, 8, 3),
    ("sm_90", 256, 1): (128, 16, 8, 3),
}
# By head dimension rounded up: context tokens, warps, stages. Rows are 16 or the heads that share a KV head.
_DECODE = {64: (64, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)}


def prefill_tiles(arch: str, head_dim: int, group: int, cache_dtype: DTypeLike) -> PrefillTiles:
    """Tiles of `ragged_paged_attention`.

    Args:
        arch: ``sm_80`` or ``sm_90``.
        head_dim: up to 256.
        group: heads that share a KV head.
        cache_dtype: of keys and values. Of float32 no more is asked than that it runs.

    Raises:
        KeyError: there is no entry.
    """
    size = jnp.dtype(cache_dtype).itemsize
    if size == 4:
        return PrefillTiles(max(1, 32 // power_of_two(group)), 16, 4, 1)
    rows, tokens, num_warps, num_stages = _PREFILL[arch, max(64, power_of_two(head_dim)), size]
    return PrefillTiles(max(1, rows // power_of_two(group)), tokens, num_warps, num_stages)


def decode_tiles(
    arch: str, head_dim: int, cache_dtype: DTypeLike, sequences: int, kv_heads: int, max_context: int
) -> DecodeTiles:
    """Tiles of `paged_decode`, and as many segments as it takes to give every SM something to do.

    Args:
        arch: ``sm_80`` or ``sm_90``.
        head_dim: up to 256.
        cache_dtype: of keys and values. Of float32 no more is asked than that it runs.
        sequences, kv_heads: there are so many programs without segments.
        max_context: most tokens of a sequence.

    Raises:
        KeyError: there is no entry.
    """
    tokens, num_warps, num_stages = _DECODE[max(64, power_of_two(head_dim))]
    if jnp.dtype(cache_dtype).itemsize == 4:
        tokens, num_stages = 16, 1
    wanted = power_of_two(-(-NUM_SMS[arch] // (sequences * kv_heads)))
    return DecodeTiles(tokens, min(wanted, power_of_two(-(-max_context // tokens))), num_warps, num_stages)


def write_tiles(head_dim: int) -> WriteTiles:
    """Tiles of `kv_cache_write`: 4,096 numbers, which 4 warps hold in registers."""
    return WriteTiles(4096 // power_of_two(head_dim), 4)


def matmul_tiles(arch: str, rows: int, weight_dtype: DTypeLike) -> MatmulTiles:
    """Tiles of `quant_matmul` for so many rows; groups of weights are at least 128 rows long.

    Raises:
        KeyError: there is no entry.
    """
    if rows <= 16:
        return _MATMUL_FEW
    return _MATMUL_MANY[arch, jnp.dtype(weight_dtype).name]


_MATMUL_FEW = MatmulTiles(16, 64, 64, 4, 4)
_MATMUL_MANY = {
    ("sm_80", "int8"): MatmulTiles(128, 128, 64, 8, 3),
    ("sm_80", "uint8"): MatmulTiles(64, 128, 32, 8, 3),
    ("sm_90", "int8"): MatmulTiles(128, 128, 64, 8, 3),
    ("sm_90", "uint8"): MatmulTiles(128, 128, 32, 8, 3),
    ("sm_90", "float8_e4m3fn"): MatmulTiles(128, 128, 64, 8, 3),
}
