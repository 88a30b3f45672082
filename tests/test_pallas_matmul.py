"""Products with quantised weights, interpreted on the CPU, against their reference."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from kernel_cases import expect_close

from pallas_kernels import reference
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.tuning import MatmulTiles


@dataclass(frozen=True)
class MatmulCase:
    """What a kernel is compiled for; for W8A8 ``x`` is of the weights' dtype, and those lie transposed."""

    x: str
    w: str
    rows: int
    inner: int
    columns: int
    groups: int
    tiles: tuple[int, int, int]

    @property
    def is_w8a8(self) -> bool:
        return self.x == self.w


CASES = [
    MatmulCase("bfloat16", "int8", 5, 128, 40, 1, (16, 32, 32)),
    MatmulCase("float16", "int8", 37, 192, 64, 3, (16, 16, 32)),
    MatmulCase("bfloat16", "float8_e4m3fn", 17, 128, 33, 1, (16, 32, 64)),
    MatmulCase("float16", "float8_e4m3fn", 1, 256, 100, 4, (16, 64, 16)),
    MatmulCase("bfloat16", "uint8", 1, 256, 72, 1, (16, 32, 32)),
    MatmulCase("bfloat16", "uint8", 19, 256, 40, 4, (16, 32, 32)),
    MatmulCase("float16", "uint8", 33, 384, 17, 3, (32, 16, 16)),
    MatmulCase("float16", "uint8", 16, 128, 32, 2, (16, 32, 32)),
    MatmulCase("int8", "int8", 5, 128, 40, 1, (16, 32, 32)),
    MatmulCase("int8", "int8", 18, 128, 31, 2, (16, 16, 32)),
    MatmulCase("float8_e4m3fn", "float8_e4m3fn", 21, 192, 50, 1, (16, 32, 64)),
    MatmulCase("float8_e4m3fn", "float8_e4m3fn", 3, 128, 16, 4, (16, 16, 32)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quant_matmul(case: MatmulCase) -> None:
    tiles = MatmulTiles(*case.tiles, num_warps=4, num_stages=2)
    run = jax.jit(functools.partial(quant_matmul, tiles=tiles, interpret=True))
    expect = jax.jit(reference.quant_matmul)
    pack = jax.jit(reference.pack_int4, static_argnums=1)

    def quantized(rng: np.random.Generator, dtype: str, shape: tuple[int, int], spread: float) -> np.ndarray:
        """The whole range of a dtype, its ends often."""
        if dtype == "float8_e4m3fn":
            return np.clip(rng.standard_normal(shape) * 448 * spread, -448, 448).astype(jnp.dtype(dtype))
        low, high = (-8, 7) if dtype == "uint8" else (-128, 127)
        return np.clip(np.rint(rng.standard_normal(shape) * high * spread), low, high).astype(np.int8)

    @settings(max_examples=26, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        spread = data.draw(st.sampled_from([0.05, 0.4, 3.0]), "spread of the weights")
        w = quantized(rng, case.w, (case.inner, case.columns), spread)
        scales = (10.0 ** rng.uniform(-3, 1, (case.groups, case.columns))).astype(np.float32)
        scales[rng.random(scales.shape) < data.draw(st.sampled_from([0.0, 0.3]), "share of scales that are 0")] = 0
        if case.w == "uint8":
            w = np.asarray(pack(w, case.groups))
        x_scales = None
        if case.is_w8a8:
            w = np.ascontiguousarray(w.T)
            x = quantized(rng, case.x, (case.rows, case.inner), spread)
            x_scales = (10.0 ** rng.uniform(-3, 1, case.rows)).astype(np.float32)
        else:
            x = rng.standard_normal((case.rows, case.inner)).astype(jnp.dtype(case.x))
        got, expected = (np.asarray(product(x, w, scales, x_scales)) for product in (run, expect))
        assert got.dtype == np.float32
        # Each result against the largest of its own column and row scale, or great ones would hide the others' errors.
        size = np.maximum(scales.max(0), 1e-30)[None, :] * (1 if x_scales is None else x_scales[:, None])
        expect_close(got / size, expected / size, "float32")

    check()


@pytest.mark.parametrize(
    ("x", "w", "scales", "inner"),
    [
        ((2, 64), (64, 16), (4, 16), 32),  # groups of 16 rows, tiles of 32
        ((2, 64), (32, 16), (2, 16), 32),  # pairs: groups of 32 rows, steps of 64
        ((2, 64), (16, 64), (4, 16), 32),  # the same, with the weights transposed
        ((2, 48), (48, 16), (1, 16), 32),  # one group, no multiple of the tile
        ((2, 65), (65, 16), (2, 16), 32),  # rows that are no multiple of the groups
    ],
)
def test_tiles_that_do_not_fit(x: tuple[int, int], w: tuple[int, int], scales: tuple[int, int], inner: int) -> None:
    tiles = MatmulTiles(16, 16, inner, num_warps=4, num_stages=2)
    is_w8a8, dtype = w[0] == 16, jnp.uint8 if w[0] == x[1] // 2 else jnp.int8
    rows, x_scales = jnp.zeros(x, jnp.int8 if is_w8a8 else jnp.bfloat16), jnp.ones(x[0]) if is_w8a8 else None
    with pytest.raises(ValueError, match="group"):
        quant_matmul(rows, jnp.zeros(w, dtype), jnp.ones(scales), x_scales, tiles=tiles, interpret=True)


@pytest.mark.parametrize(("rows", "columns", "groups"), [(2, 1, 1), (8, 5, 4), (12, 3, 3), (64, 2, 2)])
def test_packing(rows: int, columns: int, groups: int) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st_numpy.arrays(np.int8, (rows, columns), elements=st.integers(-8, 7)))
    def check(w: np.ndarray) -> None:
        packed = reference.pack_int4(jnp.asarray(w), groups)
        assert packed.dtype == np.uint8
        assert packed.shape == (rows // 2, columns)
        np.testing.assert_array_equal(np.asarray(reference.unpack_int4(packed, groups)), w)

    check()


def test_layout_of_pairs() -> None:
    """In each group the first half of the rows is in the low halves of the bytes."""
    w = jnp.array([[-8], [-7], [0], [7], [1], [2], [3], [4]], jnp.int8)
    np.testing.assert_array_equal(np.asarray(reference.pack_int4(w, 2))[:, 0], [0x80, 0xF1, 0xB9, 0xCA])


def test_the_reference() -> None:
    """Each weight times its group's scale, in float64."""
    rng = np.random.default_rng(0)
    x, scales = rng.standard_normal((3, 12)), rng.random((3, 5))
    weights, x_scales = rng.integers(-8, 8, (12, 5)), rng.random(3)
    wide = x @ (weights * scales.repeat(4, axis=0))
    w = jnp.asarray(weights, jnp.int8)
    rows = (jnp.asarray(x, jnp.float32), jnp.asarray(scales, jnp.float32), jnp.asarray(x_scales, jnp.float32))
    expect_close(np.asarray(reference.quant_matmul(rows[0], w, rows[1])), wide, "float32")
    pairs = reference.pack_int4(w, 3)
    expect_close(np.asarray(reference.quant_matmul(rows[0], pairs, rows[1])), wide, "float32")
    scaled = np.asarray(reference.quant_matmul(rows[0], w.T, rows[1], rows[2]))
    expect_close(scaled, wide * x_scales[:, None], "float32")
