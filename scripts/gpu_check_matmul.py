"""Section `matmul` of the GPU check: times of products with quantised weights, and a search around their tiles."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gpu_check_cases import TOY, Case, Result, Setup, Timing, describe, group_sizes, neighbours, random_array
from jax import lax

from pallas_kernels import shapes, tuning
from pallas_kernels.quant_matmul import quant_matmul

MODEL = "Llama 3 8B"
PRODUCTS = ((4096, 28_672), (14_336, 4096))
ROWS = (1, 64, 2048)
SEARCHED = (("W4A16", 1), ("W8A16", 1), ("W8A16", 2048), ("W4A16", 2048))
TILE_LIMITS = {"rows": (16, 256), "columns": (16, 256), "inner": (16, 128), "num_warps": (2, 8), "num_stages": (1, 5)}
MOST_RESULT_BYTES = 1 << 30  # of one program


def cases(setup: Setup) -> list[Case]:
    """Every kind of weights at few and many rows; bfloat16 by XLA beside them; then tiles."""
    kinds = shapes.weight_kinds(setup.arch)
    if setup.interpret:
        few = [*_tiles(setup, "W4A16", 3, TOY.products[0])][1:2]
        return [product(setup, "W4A16", 3, TOY.products[0]), dense(setup, 3, TOY.products[0]), *few]
    listed: list[Case] = []
    for rows in ROWS:
        for shape in PRODUCTS:
            listed += [product(setup, kind, rows, shape) for kind in kinds]
            listed.append(dense(setup, rows, shape))
    for kind, rows in SEARCHED:
        listed += _tiles(setup, kind, rows, PRODUCTS[0])
    return listed


def _tiles(setup: Setup, kind: str, rows: int, shape: tuple[int, int]) -> list[Timing]:
    own = tuning.matmul_tiles(setup.arch, rows, shapes.matmul_arguments(kind, rows, *shape)["w"].dtype)
    step = 2 if kind == "W4A16" else 1  # rows of weights in a stored one
    group = shapes.GROUP_SIZE if kind == "W4A16" else shape[0]
    tried = [tiles for tiles in neighbours(own, TILE_LIMITS) if group % (step * tiles.inner) == 0]
    return [product(setup, kind, rows, shape, tiles=tiles) for tiles in tried]


def product(
    setup: Setup, kind: str, rows: int, shape: tuple[int, int], *, tiles: tuning.MatmulTiles | None = None
) -> Timing:
    """`quant_matmul`, with other weights for each call; ``tiles`` None for those of the table."""
    spec = shapes.matmul_arguments(kind, rows, *shape)
    own = tuning.matmul_tiles(setup.arch, rows, spec["w"].dtype)
    step = jax.jit(partial(quant_matmul, tiles=tiles or own, interpret=setup.interpret))
    weights = {name: spec.pop(name) for name in ("w", "scales")}

    def function(fixed: dict[str, Any], group: list[dict[str, Any]]) -> list[jax.Array]:
        return [step(**fixed, **one) for one in group]

    is_eight = spec["x_scales"] is not None
    facts = {"tiles": describe(tiles or own), "rate_factor": 2 if is_eight else 1}
    if tiles is not None:
        facts["is_own"] = tiles == own
    return _timing(setup, kind, rows, shape, function, spec, weights, facts)


def dense(setup: Setup, rows: int, shape: tuple[int, int]) -> Timing:
    """The same product with bfloat16 weights by XLA."""
    inputs, outputs = shape
    spec = {"x": jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)}
    weights = {"w": jax.ShapeDtypeStruct((inputs, outputs), jnp.bfloat16)}

    def function(fixed: dict[str, Any], group: list[dict[str, Any]]) -> list[jax.Array]:
        x, results = fixed["x"], []
        for one in group:
            results.append(jnp.dot(x, one["w"], preferred_element_type=jnp.float32))
            x, _ = lax.optimization_barrier((x, results[-1]))  # or XLA would make one product of them all
        return results

    return _timing(setup, "bfloat16, XLA", rows, shape, function, spec, weights, {})


def _timing(
    setup: Setup,
    kind: str,
    rows: int,
    shape: tuple[int, int],
    function: Any,
    spec: dict[str, Any],
    weights: dict[str, Any],
    facts: Result,
) -> Timing:
    inputs, outputs = shape
    weight_bytes = sum(_bytes(one) for one in weights.values())
    moved = weight_bytes + sum(_bytes(one) for one in spec.values() if one is not None) + 4 * rows * outputs
    calls, _ = group_sizes(weight_bytes)
    most = min(setup.memory // 8 // weight_bytes, MOST_RESULT_BYTES // (4 * rows * outputs))
    calls = 1 if setup.interpret else max(1, min(calls, most))

    def fill(spec: jax.ShapeDtypeStruct, seed: int = 0) -> jax.Array:
        return random_array(spec.shape, spec.dtype, seed)

    def make() -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
        setup.pools.drop()
        group = [{name: fill(one, seed) for name, one in weights.items()} for seed in range(calls)]
        return jax.tree.map(fill, spec), [group]

    label = f"{rows} x {inputs} x {outputs}"
    facts |= {
        "status": "ok", "model": MODEL, "kind": kind, "shape": label, "bytes": moved,
        "flops": 2 * rows * inputs * outputs,
    }  # fmt: skip
    is_trial = "is_own" in facts
    name = f"{kind}: {label}" + (f", tiles {facts['tiles']}" if is_trial else "")
    arguments = (spec, [weights] * calls)
    return Timing(name, function, arguments, make, facts, is_trial=is_trial, is_quick=setup.interpret)


def _bytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
