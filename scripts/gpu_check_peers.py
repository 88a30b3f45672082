"""Section `peers` of the GPU check: times of other people's attention, on shapes of section `attention`."""

import importlib
import importlib.util
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_check_attention import fitting
from gpu_check_cases import TOY, Case, Result, Run, Setup, Timing, group_sizes, random_array

from pallas_kernels import shapes
from pallas_kernels.shapes import BLOCK_SIZE, ModelShape

DECODES = ((1, 8192), (8, 4096), (64, 4096), (256, 1024))
TORCH_DECODES = ((8, 4096), (64, 4096), (256, 1024))
TORCH_CHUNKS = (2048, 8192)
TORCH_LIMIT_S = 90


def cases(setup: Setup) -> list[Case]:
    """JAX's own paged attention, and PyTorch's attention over caches that lie in one piece."""
    if setup.interpret:
        return [pages(setup, "toy", TOY, (2, 128)), Torch(TOY, ((2, 40),), (8,))]
    listed: list[Case] = []
    for name in ("Llama 3 8B", "Llama 3 70B / 8"):
        listed += [pages(setup, name, shapes.MODELS[name], shape) for shape in DECODES]
    model = shapes.MODELS["Llama 3 8B"]
    tokens = setup.pool_blocks(model) * BLOCK_SIZE
    return [*listed, Torch(model, tuple(fitting(shape, tokens) for shape in TORCH_DECODES), TORCH_CHUNKS)]


def paged_attention() -> Callable[..., Any]:
    """JAX's; it is deprecated there, and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    function: Callable[..., Any] = module.paged_attention
    return function


def pages(setup: Setup, name: str, model: ModelShape, shape: tuple[int, int]) -> Timing:
    """`jax.experimental.pallas.ops.gpu.paged_attention` with its own tiles, cut where a context is too short for them.

    It knows no scale, window or sinks; for time that is the same.
    """
    num_blocks = setup.pool_blocks(model)
    sequences, context = fitting(shape, num_blocks * BLOCK_SIZE)
    columns = context // BLOCK_SIZE
    splits = math.gcd(16, columns)
    together = math.gcd(8, columns // splits)
    spec = {
        "q": jax.ShapeDtypeStruct((sequences, model.heads, model.head_dim), jnp.bfloat16),
        "k": jax.ShapeDtypeStruct((num_blocks, model.kv_heads, BLOCK_SIZE, model.head_dim), jnp.bfloat16),
        "v": jax.ShapeDtypeStruct((num_blocks, model.kv_heads, BLOCK_SIZE, model.head_dim), jnp.bfloat16),
        "lengths": jax.ShapeDtypeStruct((sequences,), jnp.int32),
    }
    tables = jax.ShapeDtypeStruct((sequences, columns), jnp.int32)
    moved = shapes.decode_bytes(model, "bfloat16", [context] * sequences)
    calls, groups = group_sizes(moved)

    def function(fixed: dict[str, jax.Array], group: list[jax.Array]) -> list[jax.Array]:
        # The same memory: the numbers are random anyway.
        k, v = (fixed[one].reshape(model.kv_heads, num_blocks, BLOCK_SIZE, model.head_dim) for one in ("k", "v"))
        attend = partial(
            paged_attention(), k_splits=splits, pages_per_compute_block=together, interpret=setup.interpret
        )
        return [attend(fixed["q"], k, v, block_tables, fixed["lengths"]) for block_tables in group]

    def make() -> tuple[dict[str, Any], list[list[np.ndarray]]]:
        k, v = setup.pools.get(spec["k"])
        fixed = {
            "q": random_array(spec["q"].shape, jnp.bfloat16),
            "k": k,
            "v": v,
            "lengths": np.full(sequences, context, np.int32),
        }
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        sets = np.resize(order, (groups * calls, *tables.shape))
        return fixed, [list(sets[at : at + calls]) for at in range(0, len(sets), calls)]

    label = f"decode {shape[0]} x {shape[1]}"
    facts: Result = {"status": "ok", "peer": "jax paged_attention", "model": name, "shape": label, "bytes": moved}
    facts |= {"flops": 4 * model.heads * model.head_dim * sequences * context}
    if (sequences, context) != shape:
        facts["scaled"] = f"{sequences} x {context}"
    return Timing(
        f"jax paged_attention, {label}: {name}", function, (spec, [tables] * calls), make, facts,
        is_trial=True, is_quick=setup.interpret,
    )  # fmt: skip


@dataclass(frozen=True)
class Torch:
    """PyTorch's SDPA, in a process of its own: CUDA's libraries may be others there, and memory is given back."""

    model: ModelShape
    decodes: tuple[tuple[int, int], ...]
    chunks: tuple[int, ...]
    name: str = "PyTorch SDPA"
    is_trial: bool = True

    def build(self) -> Run:
        """Nothing to do."""
        return self._run

    def _run(self) -> Result:
        if importlib.util.find_spec("torch") is None:
            return {"status": "skipped", "message": "PyTorch is not installed"}
        model = {"heads": self.model.heads, "kv_heads": self.model.kv_heads, "head_dim": self.model.head_dim}
        asked = json.dumps(model | {"decodes": self.decodes, "chunks": self.chunks})
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("gpu_check_torch.py")), asked],
            capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            return {"status": "failed", "message": (done.stderr.strip().splitlines() or ["it ended"])[-1]}
        result: Result = json.loads(done.stdout)
        for row in result.get("rows", ()):
            if row["shape"].startswith("decode"):
                sequences, context = map(int, row["shape"].split()[1::2])
                row["bytes"] = shapes.decode_bytes(self.model, "bfloat16", [context] * sequences)
                row["flops"] = 4 * self.model.heads * self.model.head_dim * sequences * context
            else:
                row["bytes"], row["flops"] = 0, shapes.prefill_flops(self.model, int(row["shape"].split()[1]), 0)
        return result
