"""Section `correctness` of the GPU check: every kernel on the device against its reference on the CPU."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_cases import TOY, Case, Result, Run, Setup

from pallas_kernels import reference, shapes, tuning
from pallas_kernels.kv_cache_write import kv_cache_write
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.shapes import BLOCK_SIZE, ModelShape

TOLERANCE = 1.5e-2  # of the largest value
FLOAT8_STEP = 32 / 448  # between the two largest numbers: rounding that goes the other way is that far off
DIFFERING = 0.01  # share of a cache's numbers that may be rounded the other way
WINDOW = 50  # of the models that have one: theirs is longer than a small batch
SPARE_BLOCKS = 3
# Queries, and tokens before them: first two decodes; one sequence is empty; the chunks begin anywhere.
RAGGED = ((1, 0), (1, 199), (37, 0), (150, 150), (0, 0), (5, 255))
PADDING = 6  # rows of no sequence
DECODE_LENS = (1, 200, 37, 300, 0, 255)
SEGMENTS = (1, 4)
QUANTISED = ("Llama 3 8B", "Gemma 3 12B", "gpt-oss 20B", "Phi 2")  # the models whose caches are quantised here
TOY_RAGGED = ((1, 20), (0, 0), (9, 7))
TOY_DECODE_LENS = (0, 40)

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A kernel's call and what it must give.

    Attributes:
        function: calls the kernel.
        reference: the same on the CPU.
        make: gives the kernel's arrays and the reference's, by name, as NumPy arrays.
        compare: of what both gave.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    make: Callable[[], tuple[Arrays, Arrays]]
    compare: Callable[[Any, Any], Result]
    is_trial: bool = False

    @property
    def arguments(self) -> tuple[Arrays]:
        """The kernel's arrays, as `jax.ShapeDtypeStruct`."""
        return (jax.eval_shape(lambda arrays: arrays, self.make()[0]),)

    def call(self, arrays: Arrays) -> Any:
        """The kernel, on its arrays."""
        return self.function(**arrays)

    def build(self) -> Run:
        """Compile the kernel, and run the reference."""
        arrays, clean = self.make()
        compiled = jax.jit(self.call).lower(arrays).compile()
        with jax.default_device(jax.devices("cpu")[0]):
            expected = jax.tree.map(np.asarray, jax.jit(self.reference)(**clean))
        return lambda: self.compare(jax.tree.map(np.asarray, compiled(arrays)), expected)


def verdict(error: float, tolerance: float, message: str = "") -> Result:
    """A check's result; ``error`` may be NaN."""
    is_ok = not message and error <= tolerance
    shown = float(error) if np.isfinite(error) else None
    if not is_ok and not message:
        message = "not finite" if shown is None else f"error {error:.2e}, over {tolerance:.2e}"
    more = {} if is_ok else {"message": message}
    return {"status": "ok" if is_ok else "failed", "error": shown, "tolerance": tolerance} | more


def close(got: np.ndarray, expected: np.ndarray, rows: slice = slice(None)) -> Result:
    """Compare the rows that count, relative to the largest value."""
    got, expected = got[rows].astype(np.float32), expected[rows].astype(np.float32)
    return verdict(np.abs(got - expected).max() / np.abs(expected).max(), TOLERANCE)


def cases(setup: Setup) -> list[Case]:
    """Every kernel, over every head dimension and group, window, soft cap and sinks."""
    return [*_attention(setup), *_writes(setup), *_matmuls(setup)]


def _attention(setup: Setup) -> Iterator[Check]:
    models = [TOY] if setup.interpret else list(shapes.attention_kinds())
    quantised = [shapes.MODELS[name] for name in QUANTISED]
    batch = TOY_RAGGED if setup.interpret else RAGGED
    lens = TOY_DECODE_LENS if setup.interpret else DECODE_LENS
    for model in models:
        name = next((name for name, one in shapes.MODELS.items() if one == model), "toy")
        dtypes = shapes.cache_dtypes(setup.arch) if model in quantised else ("bfloat16",)
        # The code of a kernel is the same for any number of heads.
        kv_heads = min(model.kv_heads, 2)
        window = None if model.window is None else WINDOW
        small = dataclasses.replace(model, heads=kv_heads * model.group, kv_heads=kv_heads, window=window)
        for dtype in dtypes:
            yield _ragged(setup, f"{name}, {dtype}", small, dtype, batch)
            yield from (_decode(setup, f"{name}, {dtype}", small, dtype, lens, n) for n in SEGMENTS)


def _ragged(setup: Setup, label: str, model: ModelShape, dtype: str, batch: Sequence[tuple[int, int]]) -> Check:
    tiles = tuning.prefill_tiles(setup.arch, model.head_dim, model.group, dtype)
    options = {"scale": model.head_dim**-0.5, "softcap": model.softcap}
    num_decodes = sum(q_len == 1 for q_len, _ in batch)
    q_lens = np.array([q_len for q_len, _ in batch])

    def make() -> tuple[Arrays, Arrays]:
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        kernel, clean = attention_arrays(model, dtype, q_lens.sum() + PADDING, [sum(lens) for lens in batch])
        kernel["q"][q_lens.sum() :] = np.nan
        more = {"cu_q_lens": cu_q_lens}
        return kernel | more | {"num_decodes": np.int32(num_decodes)}, clean | more

    return Check(
        f"ragged_paged_attention: {label}",
        partial(ragged_paged_attention, tiles=tiles, interpret=setup.interpret, **options),
        partial(reference.ragged_paged_attention, **options),
        make,
        partial(close, rows=slice(num_decodes, None)),  # the rows of decodes are another kernel's
    )


def _decode(setup: Setup, label: str, model: ModelShape, dtype: str, lens: Sequence[int], segments: int) -> Check:
    tiles = tuning.decode_tiles(setup.arch, model.head_dim, dtype, len(lens), model.kv_heads, max(lens))
    tiles = dataclasses.replace(tiles, segments=segments)
    options = {"scale": model.head_dim**-0.5, "softcap": model.softcap}
    return Check(
        f"paged_decode, {segments} segments: {label}",
        partial(paged_decode, tiles=tiles, interpret=setup.interpret, **options),
        partial(reference.paged_decode, **options),
        partial(attention_arrays, model, dtype, len(lens), list(lens)),
        close,
    )


def attention_arrays(model: ModelShape, dtype: str, tokens: int, kv_lens: Sequence[int]) -> tuple[Arrays, Arrays]:
    """Queries, caches and block tables of sequences with so many tokens each; twice, for kernel and reference.

    The kernel's hold NaN in every slot that no sequence has a token in, so that a look there shows.
    """
    rng = np.random.default_rng(model.head_dim + model.heads)
    max_blocks = -(-max(kv_lens) // BLOCK_SIZE)
    num_blocks = len(kv_lens) * max_blocks + SPARE_BLOCKS
    shape = (num_blocks, model.kv_heads, BLOCK_SIZE, model.head_dim)
    tables = rng.permutation(num_blocks)[:-SPARE_BLOCKS].reshape(len(kv_lens), max_blocks).astype(np.int32)
    is_token = np.zeros((num_blocks, BLOCK_SIZE), bool)
    for table, kv_len in zip(tables, kv_lens, strict=True):
        at = np.arange(kv_len)
        is_token[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = True

    def spoiled(array: np.ndarray) -> np.ndarray:
        mask = is_token[:, None, :, None] if array.ndim == 4 else is_token[:, None, :]
        return array if array.dtype == np.int8 else np.where(mask, array, np.array(np.nan, array.dtype))

    numbers = rng.standard_normal((2, *shape), np.float32)
    stored = np.clip(np.round(40 * numbers), -127, 127) if dtype == "int8" else numbers
    contents = dict(zip(("k_cache", "v_cache"), stored.astype(jnp.dtype(dtype)), strict=True))
    if jnp.dtype(dtype).itemsize == 1:
        sizes = 2.0 ** rng.integers(-2, 2, (2, *shape[:3])) / (40 if dtype == "int8" else 1)
        contents |= dict(zip(("k_scales", "v_scales"), sizes.astype(np.float32), strict=True))
    both = {
        "block_tables": tables,
        "kv_lens": np.array(kv_lens, np.int32),
        "window": None if model.window is None else np.int32(model.window),
        "sinks": rng.standard_normal(model.heads).astype(np.float32) if model.sinks else None,
    }
    q = rng.standard_normal((tokens, model.heads, model.head_dim), np.float32).astype(jnp.bfloat16)
    kernel = {"q": q.copy()} | {name: spoiled(array) for name, array in contents.items()}
    return both | kernel, both | contents | {"q": q}


def _writes(setup: Setup) -> Iterator[Check]:
    head_dims = (64,) if setup.interpret else (64, 80, 128, 256)
    for head_dim in head_dims:
        for dtype in ("int8",) if setup.interpret else shapes.cache_dtypes(setup.arch):
            yield Check(
                f"kv_cache_write: head dimension {head_dim}, {dtype}",
                partial(kv_cache_write, tiles=tuning.write_tiles(head_dim), interpret=setup.interpret),
                reference.kv_cache_write,
                partial(_write_arrays, head_dim, dtype),
                _same_cache,
            )


def _write_arrays(head_dim: int, dtype: str) -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(head_dim)
    shape, tokens = (12, 2, BLOCK_SIZE, head_dim), 100
    arrays: Arrays = {}
    for cache, scales, new in (("k_cache", "k_scales", "k"), ("v_cache", "v_scales", "v")):
        arrays[new] = rng.standard_normal((tokens, *shape[1::2]), np.float32).astype(jnp.bfloat16)
        arrays[cache] = rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
        if arrays[cache].dtype.itemsize == 1:
            arrays[scales] = rng.random(shape[:3], np.float32)
    slots = rng.permutation(shape[0] * BLOCK_SIZE)[:tokens].astype(np.int32)
    slots[::7] = shape[0] * BLOCK_SIZE  # to leave out
    return arrays | {"slots": slots}, arrays | {"slots": slots}


def _same_cache(got: Sequence[Any], expected: Sequence[Any]) -> Result:
    """Equal, but that a GPU's division may round a quantised number to the other side."""
    worst, differing = 0.0, 0.0
    for one, other, scales in zip(got[:2], expected[:2], expected[2:], strict=True):
        differing = max(differing, float(np.mean(one != other)))
        one, other = (array.astype(np.float32) for array in (one, other))
        if scales is not None:
            one, other = one * scales[..., None], other * scales[..., None]
        worst = max(worst, float(np.abs(one - other).max() / np.abs(other).max()))
    for one, other in zip(got[2:], expected[2:], strict=True):
        if other is not None:
            worst = max(worst, float(np.abs(one - other).max() / other.max()))
    is_float8 = expected[0].dtype.name.startswith("float8")
    too_many = f"{differing:.1%} of the numbers differ" if differing > DIFFERING else ""
    tolerance = 0.0 if expected[2] is None else FLOAT8_STEP if is_float8 else TOLERANCE
    return verdict(worst, tolerance, too_many) | {"differing": differing}


def _matmuls(setup: Setup) -> Iterator[Check]:
    inputs, outputs = (256, 72) if setup.interpret else (1024, 648)
    for kind in ("W4A16",) if setup.interpret else shapes.weight_kinds(setup.arch):
        for rows in (3,) if setup.interpret else (1, 100):
            weights = shapes.matmul_arguments(kind, rows, inputs, outputs)["w"].dtype
            yield Check(
                f"quant_matmul: {kind}, {rows} rows",
                partial(quant_matmul, tiles=tuning.matmul_tiles(setup.arch, rows, weights), interpret=setup.interpret),
                reference.quant_matmul,
                partial(_matmul_arrays, kind, rows, inputs, outputs),
                close,
            )


def _matmul_arrays(kind: str, rows: int, inputs: int, outputs: int) -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(rows)

    def fill(spec: jax.ShapeDtypeStruct) -> np.ndarray:
        if spec.dtype == jnp.uint8:
            return rng.integers(256, size=spec.shape, dtype=np.uint8)
        if spec.dtype == jnp.int8:
            return rng.integers(-127, 128, size=spec.shape, dtype=np.int8)
        if spec.dtype == jnp.float32:
            return rng.random(spec.shape, np.float32) + 0.5
        return rng.standard_normal(spec.shape, np.float32).astype(spec.dtype)

    arrays = jax.tree.map(fill, shapes.matmul_arguments(kind, rows, inputs, outputs))
    return arrays, arrays
