"""Section `rates` of the GPU check: what the card itself reaches, for the other sections' times to be held against."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from gpu_check_attention import decode
from gpu_check_cases import TOY, Case, Result, Run, Setup, random_array, times

from pallas_kernels import shapes


def cases(setup: Setup) -> list[Case]:
    """Copying, a large product in bfloat16, and launching a kernel that has nothing to do."""
    model = TOY if setup.interpret else shapes.MODELS["Llama 3 70B / 8"]
    return [
        Copy(min(1 << 30, setup.memory // 8) if not setup.interpret else 1 << 16, setup.interpret),
        Product(8192 if not setup.interpret else 64, setup.interpret),
        decode(setup, "launch", model, "bfloat16", (1, 16), contexts=[0]),
    ]


@dataclass(frozen=True)
class Copy:
    """Bytes read and written in a second, by a copy of ``size`` bytes; `jnp.copy` may be no copy to a compiler."""

    size: int
    is_quick: bool
    name: str = "copy"
    is_trial: bool = False

    def build(self) -> Run:
        """Compile."""
        shape = jax.ShapeDtypeStruct((self.size // 2,), jnp.bfloat16)
        return partial(self._run, jax.jit(jnp.negative).lower(shape).compile())

    def _run(self, compiled: Any) -> Result:
        x = random_array((self.size // 2,), jnp.bfloat16)
        timed = times(lambda _: compiled(x), 1, is_quick=self.is_quick)
        return timed | {"bytes_per_s": 2e6 * self.size / timed["us"]}


@dataclass(frozen=True)
class Product:
    """Operations in a second of ``[size, size]`` matrices of random bfloat16 numbers."""

    size: int
    is_quick: bool
    name: str = "product"
    is_trial: bool = False

    def build(self) -> Run:
        """Compile."""
        shape = jax.ShapeDtypeStruct((self.size, self.size), jnp.bfloat16)
        return partial(self._run, jax.jit(jnp.matmul).lower(shape, shape).compile())

    def _run(self, compiled: Any) -> Result:
        x, w = (random_array((self.size, self.size), jnp.bfloat16, seed) for seed in range(2))
        timed = times(lambda _: compiled(x, w), 1, is_quick=self.is_quick)
        return timed | {"flops_per_s": 2e6 * self.size**3 / timed["us"]}
