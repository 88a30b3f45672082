"""Ragged batches over a paged cache, for the tests of the attention kernels.

A case is what a kernel is compiled for; a batch is what is in it, drawn by Hypothesis. Slots that a kernel has no
business with hold NaN, so that every comparison also shows that they were left alone.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import reference

ROWS = 48  # of every batch of queries
_SPARE_BLOCKS = 3  # blocks that are in no block table
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}


@dataclass(frozen=True)
class AttentionCase:
    """What a kernel is compiled for; ``queries`` and ``tokens`` are sizes of its tiles."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    queries: int
    tokens: int
    segments: int
    dtype: str = "float32"
    cache_dtype: str = ""  # the same, if empty
    window: bool = False
    softcap: float | None = None
    sinks: bool = False
    sequences: int = 5

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def max_blocks(self) -> int:
        return max(128 // self.block_size, 2)

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.max_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        return self.sequences * self.max_blocks + _SPARE_BLOCKS

    @property
    def stored(self) -> str:
        return self.cache_dtype or self.dtype

    @property
    def options(self) -> dict[str, Any]:
        """What both attention kernels and their references take as they are compiled."""
        return {"scale": 1.5 * self.head_dim**-0.5, "softcap": self.softcap}

    def __str__(self) -> str:
        features = [("window", self.window), ("softcap", self.softcap), ("sinks", self.sinks)]
        on = "".join(f"-{name}" for name, is_on in features if is_on)
        return (
            f"{self.kv_heads}x{self.group}-d{self.head_dim}-b{self.block_size}-q{self.queries}-t{self.tokens}"
            f"-s{self.segments}-{self.dtype}-{self.stored}{on}"
        )


_F32, _BF16, _F16, _INT8, _FP8 = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
CASES = [
    # heads, dim, block, queries, tokens, segments
    AttentionCase(2, 1, 64, 16, 16, 16, 1),
    AttentionCase(2, 7, 80, 8, 4, 16, 2, window=True),
    AttentionCase(1, 8, 96, 32, 2, 16, 3, softcap=2.0),
    AttentionCase(2, 3, 112, 16, 8, 32, 8, sinks=True, sequences=3),
    AttentionCase(1, 4, 128, 64, 8, 32, 1, window=True, softcap=5.0, sinks=True),
    AttentionCase(1, 2, 256, 128, 8, 64, 2, window=True, sequences=1),
    AttentionCase(2, 2, 80, 128, 16, 16, 8, window=True, sinks=True),
    AttentionCase(1, 16, 64, 32, 1, 32, 1, softcap=30.0, sinks=True, sequences=8),
    AttentionCase(2, 7, 64, 16, 4, 32, 1, _F32, _INT8, window=True, softcap=3.0, sinks=True),
    AttentionCase(1, 8, 128, 32, 4, 16, 3, _F32, _FP8, window=True, softcap=3.0, sinks=True),
    AttentionCase(3, 5, 112, 8, 4, 64, 8, _F32, _FP8, window=True, sequences=7),
    AttentionCase(2, 4, 128, 16, 8, 64, 2, _BF16),
    AttentionCase(2, 1, 256, 16, 16, 16, 1, _BF16, window=True, sinks=True),
    AttentionCase(1, 7, 64, 64, 4, 32, 3, _BF16, _INT8, window=True, softcap=10.0),
    AttentionCase(2, 2, 128, 32, 8, 64, 8, _BF16, _FP8, sinks=True),
    AttentionCase(2, 8, 80, 16, 2, 32, 1, _F16, window=True, softcap=20.0),
    AttentionCase(2, 1, 96, 8, 16, 16, 2, _F16, _INT8, sinks=True),
    AttentionCase(1, 3, 112, 128, 8, 128, 3, _F16, _FP8, window=True),
]


@dataclass(frozen=True)
class Batch:
    """Host arrays of one step; sequences before ``num_decodes`` have one query each."""

    block_tables: np.ndarray
    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    num_decodes: int
    window: int

    @property
    def q_lens(self) -> np.ndarray:
        return np.diff(self.cu_q_lens)


@dataclass(frozen=True)
class Contents:
    """A case's numbers: queries, caches, and what it may lack."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_scales: np.ndarray | None
    v_scales: np.ndarray | None
    sinks: np.ndarray | None


@functools.cache
def contents(case: AttentionCase) -> Contents:
    """The same numbers for all batches of a case; scales are such that a wrong one shows."""
    rng = np.random.default_rng(case.head_dim + case.block_size)
    shape = (case.num_blocks, case.kv_heads, case.block_size, case.head_dim)
    q = rng.standard_normal((ROWS, case.heads, case.head_dim)).astype(jnp.dtype(case.dtype))
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    sinks = (2 * rng.standard_normal(case.heads)).astype(np.float32) if case.sinks else None
    if not case.cache_dtype:
        k, v = (array.astype(jnp.dtype(case.dtype)) for array in (k, v))
        return Contents(q, k, v, None, None, sinks)
    sizes = 2.0 ** rng.integers(-2, 2, (2, *shape[:3]))
    quantized = jax.jit(reference.quantize, static_argnums=1)
    (k, k_scales), (v, v_scales) = (
        tuple(np.asarray(part) for part in quantized(array * size[..., None], jnp.dtype(case.cache_dtype)))
        for array, size in zip((k, v), sizes.astype(np.float32), strict=True)
    )
    return Contents(q, k, v, k_scales, v_scales, sinks)


def _lengths(most: int, *sizes: int) -> st.SearchStrategy[int]:
    """0 to ``most``, often at the edges of blocks and tiles."""
    edges = {edge + by for size in sizes for edge in range(0, most + 1, size) for by in (-1, 0, 1)} | {most}
    return st.integers(0, most) | st.sampled_from(sorted(edge for edge in edges if 0 <= edge <= most))


@st.composite
def _block_tables(draw: st.DrawFn, case: AttentionCase) -> np.ndarray:
    """Blocks in any order, mostly each in one place, sometimes shared as prefixes are."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (case.sequences, case.max_blocks)
    if draw(st.integers(0, 3)) == 3:
        return rng.integers(case.num_blocks, size=shape, dtype=np.int32)
    return rng.permutation(case.num_blocks)[: shape[0] * shape[1]].reshape(shape).astype(np.int32)


@st.composite
def decode_batches(draw: st.DrawFn, case: AttentionCase) -> Batch:
    """One query for each sequence, some of them empty."""
    lengths = _lengths(case.context, case.block_size, case.tokens)
    kv_lens = draw(st.lists(lengths, min_size=case.sequences, max_size=case.sequences))
    window = draw(_lengths(case.context + 2, case.tokens).filter(bool))
    cu_q_lens = np.arange(case.sequences + 1, dtype=np.int32)
    return Batch(draw(_block_tables(case)), cu_q_lens, np.array(kv_lens, np.int32), case.sequences, window)


@st.composite
def ragged_batches(draw: st.DrawFn, case: AttentionCase) -> Batch:
    """Decodes first, then chunks that start anywhere in their context, some of them empty; then padding tokens."""
    num_decodes = draw(st.just(0) | st.integers(0, case.sequences))
    q_lens, kv_lens, left = [], [], ROWS
    for sequence in range(case.sequences):
        q_len = 1 if sequence < num_decodes else min(draw(_lengths(ROWS, case.queries)), left)
        past = draw(_lengths(case.context - q_len, case.block_size, case.tokens))
        # Padding has no context; a sequence without queries in this step may have one.
        q_lens.append(q_len)
        kv_lens.append(past + q_len)
        left -= q_len
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    window = draw(_lengths(case.context + 2, case.tokens).filter(bool))
    return Batch(draw(_block_tables(case)), cu_q_lens, np.array(kv_lens, np.int32), num_decodes, window)


def empty_batch(case: AttentionCase) -> Batch:
    """No sequence at all: padding only."""
    tables = np.zeros((case.sequences, case.max_blocks), np.int32)
    return Batch(tables, np.zeros(case.sequences + 1, np.int32), np.zeros(case.sequences, np.int32), 0, 1)


def poisoned(case: AttentionCase, batch: Batch, oldest: np.ndarray) -> Contents:
    """The case's numbers with NaN in every slot that holds no token from ``oldest`` to ``kv_lens`` of any sequence.

    int8 has no NaN, but its scales have.

    Args:
        oldest: for each sequence, the first of its tokens that may be read; none where it is ``kv_lens``.
    """
    clean = contents(case)
    visible = np.zeros((case.num_blocks, case.block_size), bool)
    for table, first, past in zip(batch.block_tables, oldest, batch.kv_lens, strict=True):
        at = np.arange(first, past)
        visible[table[at // case.block_size], at % case.block_size] = True

    def spoil(array: np.ndarray | None) -> np.ndarray | None:
        if array is None or array.dtype == np.int8:
            return array
        seen = visible[:, None, :, None] if array.ndim == 4 else visible[:, None, :]
        return np.where(seen, array, np.array(np.nan, array.dtype))

    k, v = spoil(clean.k), spoil(clean.v)
    assert k is not None
    assert v is not None
    return Contents(clean.q, k, v, spoil(clean.k_scales), spoil(clean.v_scales), clean.sinks)


def expect_close(got: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Finite, and within the dtype's tolerance of the largest expected value."""
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    assert np.isfinite(got).all()
    assert np.isfinite(expected).all()
    error = np.abs(got - expected).max(initial=0.0)
    assert error <= TOLERANCE[dtype] * np.abs(expected).max(initial=0.0)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal to the bit, NaN and the sign of zero included."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
