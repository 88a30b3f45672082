"""Writing into the paged cache, interpreted on the CPU, against its reference to the bit; and what quantising loses."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import same_bits

from pallas_kernels import reference
from pallas_kernels.kv_cache_write import kv_cache_write
from pallas_kernels.tuning import WriteTiles


@dataclass(frozen=True)
class WriteCase:
    """What a kernel is compiled for."""

    dtype: str
    stored: str
    tokens: int  # of the batch
    kv_heads: int
    head_dim: int
    block_size: int
    tile: int

    @property
    def is_quantized(self) -> bool:
        return self.stored in ("int8", "float8_e4m3fn")

    @property
    def slots(self) -> int:
        """Slots of the whole cache."""
        return 6 * max(16, self.block_size)


CASES = [
    WriteCase("float32", "float32", 23, 2, 64, 8, 8),
    WriteCase("bfloat16", "bfloat16", 16, 1, 80, 16, 16),
    WriteCase("float16", "float16", 9, 3, 96, 32, 4),
    WriteCase("float32", "bfloat16", 5, 2, 112, 64, 8),
    WriteCase("float32", "float16", 1, 2, 128, 128, 1),
    WriteCase("bfloat16", "float16", 12, 2, 64, 16, 8),
    WriteCase("bfloat16", "int8", 23, 2, 80, 8, 8),
    WriteCase("float32", "int8", 17, 1, 256, 32, 4),
    WriteCase("float16", "int8", 8, 4, 96, 128, 16),
    WriteCase("bfloat16", "float8_e4m3fn", 23, 2, 128, 16, 8),
    WriteCase("float32", "float8_e4m3fn", 7, 1, 112, 64, 2),
    WriteCase("float16", "float8_e4m3fn", 16, 2, 64, 8, 16),
]


def _some_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Any bits: what stays must stay whatever it is, NaN included."""
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _new(data: st.DataObject, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Keys or values, of drawn magnitude, with vectors of zeros and with numbers that no cache can hold."""
    x = rng.standard_normal(shape) * 10.0 ** data.draw(st.sampled_from([-30, -6, 0, 0, 3, 30]), "magnitude")
    x[rng.random(shape[:2]) < data.draw(st.sampled_from([0.0, 0.2, 1.0]), "share of zeros")] = 0
    largest = float(jnp.finfo(dtype).max)
    special = [np.nan, np.inf, -np.inf, largest, -largest, 448.0, 65504.0, -0.0, float(jnp.finfo(dtype).tiny)]
    where = rng.random(shape) < data.draw(st.sampled_from([0.0, 0.01, 0.5]), "share of special numbers")
    return np.where(where, rng.choice(special, shape), np.clip(x, -largest, largest)).astype(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kv_cache_write(case: WriteCase) -> None:
    run = jax.jit(functools.partial(kv_cache_write, tiles=WriteTiles(case.tile, num_warps=4), interpret=True))
    expect = jax.jit(reference.kv_cache_write)
    shape = (case.slots // case.block_size, case.kv_heads, case.block_size, case.head_dim)

    @settings(max_examples=26, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        caches = [_some_bits(rng, shape, jnp.dtype(case.stored)) for _ in range(2)]
        scales = [_some_bits(rng, shape[:3], np.dtype(np.float32)) for _ in range(2)] if case.is_quantized else []
        k, v = (_new(data, rng, (case.tokens, case.kv_heads, case.head_dim), jnp.dtype(case.dtype)) for _ in range(2))
        slots = rng.permutation(case.slots)[: case.tokens].astype(np.int32)
        is_left_out = rng.random(case.tokens) < data.draw(st.sampled_from([0.0, 0.3, 1.0]), "share left out")
        slots[is_left_out] = data.draw(st.sampled_from([case.slots, case.slots + 3, 2**30, 2**31 - 1]), "past the end")

        got = [array for array in run(*caches, k, v, slots, *scales) if array is not None]
        expected = [array for array in expect(*caches, k, v, slots, *scales) if array is not None]
        assert len(got) == len(expected) == len(caches) + len(scales)
        stays = ~np.isin(np.arange(case.slots), slots).reshape(shape[0], case.block_size)
        for before, after, wanted in zip(
            [*caches, *scales], map(np.asarray, got), map(np.asarray, expected), strict=True
        ):
            assert same_bits(after, wanted)
            after, before = (np.moveaxis(array, 1, 2) for array in (after, before))
            assert same_bits(after[stays], before[stays])
            assert np.isfinite(after[~stays].astype(np.float32)).all()

    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_what_quantizing_loses(dtype: str, stored: str) -> None:
    """Half a step of int8; of float8_e4m3fn, with 3 bits of fraction, a 16th of the value or half the least step."""
    quantize = jax.jit(reference.quantize, static_argnums=1)

    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.floats(-4, 4))
    def check(seed: int, magnitude: float) -> None:
        rng = np.random.default_rng(seed)
        x = (rng.standard_normal((5, 7, 64)) * 10**magnitude * rng.random((5, 7, 1)) ** 4).astype(jnp.dtype(dtype))
        x[0] = 0
        q, scale = (np.asarray(part) for part in quantize(x, jnp.dtype(stored)))
        assert q.dtype == jnp.dtype(stored)
        assert scale.shape == x.shape[:-1]
        exact, step = x.astype(np.float64), scale[..., None].astype(np.float64)
        error = np.abs(exact - q.astype(np.float64) * step)
        bound = step / 2 if stored == "int8" else np.maximum(np.abs(exact) / 16, step * 2.0**-10)
        # The quotient of up to 127 steps is itself rounded to float32.
        assert (error <= bound + step * 127 * 2.0**-23).all()
        largest = 127 if stored == "int8" else 448
        assert (np.abs(q.astype(np.float32)).max(-1)[scale > 0] == largest).all()
        assert (scale[0] == 0).all()
        assert (q[0].astype(np.float32) == 0).all()

    check()


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_quantizing_what_is_not_finite(stored: str) -> None:
    x = np.array([[np.nan, 1.0, -2.0], [np.inf, 1.0, -np.inf]], np.float32)
    q, scale = (np.asarray(part, np.float32) for part in reference.quantize(jnp.asarray(x), jnp.dtype(stored)))
    largest = 127.0 if stored == "int8" else 448.0
    np.testing.assert_array_equal(q[:, [0, 2]], [[0, -largest], [largest, -largest]])
    assert np.isfinite(scale).all()
    np.testing.assert_allclose(scale[0] * q[0], [0, 1, -2], rtol=1 / 16)
