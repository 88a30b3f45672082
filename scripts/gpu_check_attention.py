"""Section `attention` of the GPU check: times of the attention kernels, and a search around their tiles."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_cases import (
    TOY,
    Case,
    Result,
    Setup,
    Timing,
    describe,
    group_sizes,
    neighbours,
    random_array,
)

from pallas_kernels import shapes, tuning
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.shapes import BLOCK_SIZE, ModelShape

MODELS = ("Llama 3 8B", "Llama 3 70B / 8", "Gemma 3 12B", "gpt-oss 20B", "Qwen3 0.6B")
QUANTISED = ("Llama 3 8B", "Gemma 3 12B", "gpt-oss 20B")
DECODE, CHUNK = (64, 4096), (8192, 0)  # the shapes that the targets are set for
LONG = (1, 131_072)
TILE_LIMITS = {"tokens": (16, 256), "num_warps": (2, 8), "num_stages": (1, 5)}
MOST_GROUP_BYTES = 512 << 20  # of the results of one program

Tiles = Any


def cases(setup: Setup) -> list[Case]:
    """What matters most first: what time does not suffice for is left out from the end."""
    if setup.interpret:
        few = [*_decode_tiles(setup, "toy", TOY, (2, 40))][:2]
        return [chunk(setup, "toy", TOY, "int8", (8, 16)), decode(setup, "toy", TOY, "bfloat16", (2, 40)), *few]
    models = {name: shapes.MODELS[name] for name in MODELS}
    listed: list[Case] = []
    for name, model in models.items():
        listed += [decode(setup, name, model, "bfloat16", shape) for shape in shapes.DECODES]
        listed += [chunk(setup, name, model, "bfloat16", shape) for shape in shapes.CHUNKS]
    for name in QUANTISED:
        for dtype in shapes.cache_dtypes(setup.arch)[1:]:
            listed.append(decode(setup, name, models[name], dtype, DECODE))
            listed.append(chunk(setup, name, models[name], dtype, CHUNK))
    name, model = "Llama 3 8B", models["Llama 3 8B"]
    listed += _decode_tiles(setup, name, model, DECODE)
    listed += _chunk_tiles(setup, name, model, CHUNK)
    listed += _decode_tiles(setup, name, model, LONG)
    return listed


def _decode_tiles(setup: Setup, name: str, model: ModelShape, shape: tuple[int, int]) -> Iterator[Timing]:
    sequences, context = fitting(shape, setup.pool_blocks(model) * BLOCK_SIZE)
    own = tuning.decode_tiles(setup.arch, model.head_dim, "bfloat16", sequences, model.kv_heads, context)
    limits = {"segments": (1, 256)} | TILE_LIMITS
    for tiles in neighbours(own, limits):
        yield decode(setup, name, model, "bfloat16", shape, tiles=tiles)


def _chunk_tiles(setup: Setup, name: str, model: ModelShape, shape: tuple[int, int]) -> Iterator[Timing]:
    own = tuning.prefill_tiles(setup.arch, model.head_dim, model.group, "bfloat16")
    limits = {"queries": (-(-16 // model.group), 256 // model.group)} | TILE_LIMITS
    for tiles in neighbours(own, limits):
        yield chunk(setup, name, model, "bfloat16", shape, tiles=tiles)


def decode(
    setup: Setup,
    name: str,
    model: ModelShape,
    dtype: str,
    shape: tuple[int, int],
    *,
    tiles: tuning.DecodeTiles | None = None,
    contexts: list[int] | None = None,
) -> Timing:
    """`paged_decode`.

    Args:
        name: of the model.
        dtype: of the cache.
        shape: sequences, and the context of each.
        tiles: to be tried; None for those of the table.
        contexts: the sequences' contexts, if they are not ``shape``'s.
    """
    sequences, context = fitting(shape, setup.pool_blocks(model) * BLOCK_SIZE)
    own = tuning.decode_tiles(setup.arch, model.head_dim, dtype, sequences, model.kv_heads, context)
    step = jax.jit(
        partial(paged_decode, scale=model.head_dim**-0.5, softcap=model.softcap, tiles=tiles or own,
                interpret=setup.interpret)
    )  # fmt: skip

    def function(fixed: dict[str, jax.Array], tables: list[jax.Array]) -> jax.Array:
        out = jnp.zeros_like(fixed["q"])
        for block_tables in tables:  # each writes into the result of the one before, so none can be left out
            out = step(**fixed, block_tables=block_tables, out=out)
        return out

    lens = [context] * sequences if contexts is None else contexts
    seen = sum(min(n, model.window or n) for n in lens)
    done = {"bytes": shapes.decode_bytes(model, dtype, lens), "flops": 4 * model.heads * model.head_dim * seen}
    spec = shapes.attention_arguments(model, dtype, sequences, sequences, context)
    label = "launch" if contexts is not None else f"decode {shape[0]} x {shape[1]}"
    is_scaled = f"{sequences} x {context}" if (sequences, context) != shape else ""
    return _timing(
        setup,
        name,
        model,
        dtype,
        label,
        function,
        spec,
        {"kv_lens": np.array(lens, np.int32)},
        done,
        is_scaled,
        tiles,
        own,
    )


def chunk(
    setup: Setup,
    name: str,
    model: ModelShape,
    dtype: str,
    shape: tuple[int, int],
    *,
    tiles: tuning.PrefillTiles | None = None,
) -> Timing:
    """`ragged_paged_attention` of one sequence; ``shape`` is tokens of a chunk, and tokens before it."""
    length, before = shape
    _, context = fitting((1, sum(shape)), setup.pool_blocks(model) * BLOCK_SIZE)
    length = min(length, context)
    before = context - length
    own = tuning.prefill_tiles(setup.arch, model.head_dim, model.group, dtype)
    step = jax.jit(
        partial(ragged_paged_attention, scale=model.head_dim**-0.5, softcap=model.softcap, tiles=tiles or own,
                interpret=setup.interpret)
    )  # fmt: skip

    def function(fixed: dict[str, jax.Array], tables: list[jax.Array]) -> list[jax.Array]:
        return [step(**fixed, block_tables=block_tables) for block_tables in tables]

    spec = shapes.prefill_arguments(model, dtype, 1, length, context)
    values = {
        "kv_lens": np.array([context], np.int32),
        "cu_q_lens": np.array([0, length], np.int32),
        "num_decodes": np.int32(0),
    }
    done = {
        "bytes": shapes.decode_bytes(model, dtype, [context]),
        "flops": shapes.prefill_flops(model, length, before),
    }
    label = f"chunk {shape[0]} after {shape[1]}"
    is_scaled = f"{length} after {before}" if (length, before) != shape else ""
    return _timing(setup, name, model, dtype, label, function, spec, values, done, is_scaled, tiles, own)


def _timing(
    setup: Setup,
    name: str,
    model: ModelShape,
    dtype: str,
    label: str,
    function: Callable[..., Any],
    spec: dict[str, Any],
    values: dict[str, Any],
    done: dict[str, int],
    scaled: str,
    tiles: Tiles,
    own: Tiles,
) -> Timing:
    """A case of either kernel; ``tiles`` are those to try, and None where the table's ``own`` are meant."""
    num_blocks = setup.pool_blocks(model)
    for cache in ("k_cache", "v_cache", "k_scales", "v_scales"):
        if spec[cache] is not None:
            spec[cache] = jax.ShapeDtypeStruct((num_blocks, *spec[cache].shape[1:]), spec[cache].dtype)
    tables = spec.pop("block_tables")
    calls, groups = group_sizes(done["bytes"])
    calls = max(1, min(calls, MOST_GROUP_BYTES // (2 * math.prod(spec["q"].shape)))) if not setup.interpret else 1

    def make() -> tuple[dict[str, Any], list[list[np.ndarray]]]:
        pool = setup.pools.get(spec["k_cache"])
        arrays = dict(zip(("k_cache", "v_cache", "k_scales", "v_scales"), pool, strict=False))
        arrays["q"] = random_array(spec["q"].shape, spec["q"].dtype)
        constants = {"window": np.int32(model.window or 0), "sinks": np.zeros(model.heads, np.float32)} | values
        arrays |= {key: constants[key] for key in spec if key in constants and spec[key] is not None}
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        sets = np.resize(order, (groups * calls, *tables.shape))  # each goes on where the one before ended
        return spec | arrays, [list(sets[at : at + calls]) for at in range(0, len(sets), calls)]

    facts: Result = {"status": "ok", "model": name, "cache": dtype, "shape": label, "tiles": describe(tiles or own)}
    if scaled:
        facts["scaled"] = scaled
    if tiles is not None:
        facts["is_own"] = tiles == own
    full = f"{label}: {name}, {dtype}" + (f", tiles {describe(tiles)}" if tiles is not None else "")
    return Timing(
        "launch" if label == "launch" else full,
        function, (spec, [tables] * calls), make, facts | done, is_trial=tiles is not None, is_quick=setup.interpret,
    )  # fmt: skip


def fitting(shape: tuple[int, int], tokens: int) -> tuple[int, int]:
    """Sequences and context, halved until so many tokens hold them: fewer sequences first."""
    sequences, context = shape
    while sequences * context > tokens:
        if sequences > 1:
            sequences = -(-sequences // 2)
        else:
            context = -(-context // 2)
    return sequences, context
