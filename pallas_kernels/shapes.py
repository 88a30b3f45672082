"""The shapes that the kernels are made for: one list for tests, offline compilation and measurements.

Models are given by what a kernel sees of them, from their published configurations.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

BLOCK_SIZE = 16
POOL_TOKENS = 1 << 17  # in a lowered kernel's cache: its size is no part of a kernel's code, beyond its last index


@dataclass(frozen=True)
class ModelShape:
    """What a model asks of the kernels.

    Attributes:
        heads, kv_heads, head_dim: of attention, on one device.
        window: tokens that a windowed layer sees; None where no layer has one.
        softcap: of scores.
        sinks: whether heads have sinks.
        products: (inputs, outputs) of the layer's linear parts, on one device.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    products: tuple[tuple[int, int], ...] = ()

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.heads // self.kv_heads


MODELS = {
    "Llama 3 8B": ModelShape(32, 8, 128, products=((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))),
    "Llama 3 70B / 8": ModelShape(8, 1, 128, products=((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192))),
    "Qwen3 0.6B": ModelShape(16, 8, 128, products=((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))),
    "Qwen3 8B": ModelShape(32, 8, 128, products=((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))),
    "Qwen3 30B-A3B": ModelShape(32, 4, 128),
    "Gemma 3 270M": ModelShape(4, 1, 256, window=512),
    "Gemma 3 12B": ModelShape(16, 8, 256, window=1024),
    "Gemma 2 9B": ModelShape(16, 8, 256, window=4096, softcap=50.0),
    "Mistral 7B": ModelShape(32, 8, 128, window=4096),
    "Phi 2": ModelShape(32, 32, 80),
    "Phi 3 mini": ModelShape(32, 32, 96, window=2047),
    "gpt-oss 20B": ModelShape(64, 8, 64, window=128, sinks=True),
}
# Sequences and the context of each.
DECODES = ((1, 128), (1, 8192), (1, 131_072), (8, 4096), (64, 4096), (256, 1024))
# Tokens of a chunk, and tokens before it.
CHUNKS = ((1, 128), (512, 0), (2048, 0), (8192, 0), (2048, 30_720), (512, 130_560))
ROWS = (1, 16, 64, 256, 2048)
CACHE_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
WEIGHTS = ("W8A16", "W4A16", "W8A8", "FP8A16", "FP8A8")
GROUP_SIZE = 128  # rows of 4-bit weights with a scale in common

# float8 is no type of Ampere's: an int8 cache takes as many bytes, and int8 weights too.
LACKS_FLOAT8 = ("sm_80",)


def cache_dtypes(arch: str) -> tuple[str, ...]:
    """Types of a cache on an architecture."""
    return tuple(d for d in CACHE_DTYPES if not (arch in LACKS_FLOAT8 and d.startswith("float8")))


def weight_kinds(arch: str) -> tuple[str, ...]:
    """Kinds of weights on an architecture."""
    return tuple(w for w in WEIGHTS if not (arch in LACKS_FLOAT8 and w.startswith("FP8")))


def attention_kinds() -> Iterator[ModelShape]:
    """One model for each kernel code that the models need: what differs is the group, the head dimension, whether there
    is a window, and so on, and not how many heads there are."""
    seen = set()
    for model in MODELS.values():
        kind = (model.group, model.head_dim, model.window is not None, model.softcap, model.sinks)
        if kind not in seen:
            seen.add(kind)
            yield model


def attention_arguments(
    model: ModelShape, cache_dtype: str, sequences: int, tokens: int, context: int
) -> dict[str, Any]:
    """The arrays that both attention kernels take, as `jax.ShapeDtypeStruct`.

    Args:
        model: its shape.
        cache_dtype: of keys and values; with a quantised one come scales.
        sequences: in the batch.
        tokens: rows of queries.
        context: most tokens of a sequence.
    """
    blocks = POOL_TOKENS // BLOCK_SIZE
    cache = jax.ShapeDtypeStruct((blocks, model.kv_heads, BLOCK_SIZE, model.head_dim), jnp.dtype(cache_dtype))
    scales = None
    if cache.dtype.itemsize == 1:
        scales = jax.ShapeDtypeStruct((blocks, model.kv_heads, BLOCK_SIZE), jnp.float32)
    return {
        "q": jax.ShapeDtypeStruct((tokens, model.heads, model.head_dim), jnp.bfloat16),
        "k_cache": cache,
        "v_cache": cache,
        "block_tables": _int32(sequences, -(-context // BLOCK_SIZE)),
        "kv_lens": _int32(sequences),
        "window": None if model.window is None else _int32(),
        "sinks": jax.ShapeDtypeStruct((model.heads,), jnp.float32) if model.sinks else None,
        "k_scales": scales,
        "v_scales": scales,
    }


def prefill_arguments(model: ModelShape, cache_dtype: str, sequences: int, tokens: int, context: int) -> dict[str, Any]:
    """The arrays of `ragged_paged_attention`; see `attention_arguments`."""
    more = {"cu_q_lens": _int32(sequences + 1), "num_decodes": _int32()}
    return attention_arguments(model, cache_dtype, sequences, tokens, context) | more


def write_arguments(model: ModelShape, cache_dtype: str, tokens: int) -> dict[str, Any]:
    """The arrays of `kv_cache_write`."""
    both = attention_arguments(model, cache_dtype, 1, tokens, 1)
    new = jax.ShapeDtypeStruct((tokens, model.kv_heads, model.head_dim), jnp.bfloat16)
    kept = {name: both[name] for name in ("k_cache", "v_cache", "k_scales", "v_scales")}
    return kept | {"k": new, "v": new, "slots": _int32(tokens)}


def matmul_arguments(kind: str, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    """The arrays of `quant_matmul`, for one of `WEIGHTS`."""
    eight = jnp.float8_e4m3fn if kind.startswith("FP8") else jnp.int8
    groups = inputs // GROUP_SIZE if kind == "W4A16" else 1
    is_8x8 = kind in ("W8A8", "FP8A8")
    if kind == "W4A16":
        w = jax.ShapeDtypeStruct((inputs // 2, outputs), jnp.uint8)
    else:
        w = jax.ShapeDtypeStruct((outputs, inputs) if is_8x8 else (inputs, outputs), eight)
    return {
        "x": jax.ShapeDtypeStruct((rows, inputs), eight if is_8x8 else jnp.bfloat16),
        "w": w,
        "scales": jax.ShapeDtypeStruct((groups, outputs), jnp.float32),
        "x_scales": jax.ShapeDtypeStruct((rows,), jnp.float32) if is_8x8 else None,
    }


def decode_bytes(model: ModelShape, cache_dtype: str, contexts: list[int]) -> int:
    """The least that decoding has to move in one layer: what each sequence's window sees of keys and values, once."""
    seen = sum(min(n, model.window or n) for n in contexts)
    size = jnp.dtype(cache_dtype).itemsize
    return 2 * seen * model.kv_heads * (model.head_dim * size + (4 if size == 1 else 0))


def prefill_flops(model: ModelShape, chunk: int, before: int) -> int:
    """Multiplications and additions of one chunk in one layer, what the mask hides left out."""
    pairs = chunk * before + chunk * (chunk + 1) // 2
    if model.window is not None:
        pairs = sum(min(before + i + 1, model.window) for i in range(chunk))
    return 4 * model.heads * model.head_dim * pairs


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def product_shapes() -> list[tuple[int, int]]:
    """The linear parts of all models, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(m.products for m in MODELS.values())))
