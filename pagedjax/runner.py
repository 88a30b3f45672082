"""The device end of the engine: parameters, cache and the compiled steps, one per token bucket."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.config import ModelConfig
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.pack import StepPacker, StepShapes
from pagedjax.step import StepInput, StepOutput, step

# Compiling is mostly single-threaded C++ that lets other Python threads run.
COMPILE_THREADS = 2

OnCompiled = Callable[[int, float], None]


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes that the compiled steps need beside their arguments: the largest of them counts."""

    temporaries: int
    outputs: int


class StepRunner:
    """Runs steps on the device, each bucket compiled ahead of time with the cache donated.

    Args:
        graphdef, params: of ``load_model``.
        config: the model's shape.
        shapes: the sizes of a step.
        dtype: of the cache.
    """

    def __init__(self, graphdef: Any, params: Any, config: ModelConfig, shapes: StepShapes, dtype: str):
        self.shapes = shapes
        self._graphdef, self._params = graphdef, params
        self._new_cache = partial(init_kv_cache, config, shapes.num_blocks, shapes.block_size, dtype)
        self._kv_cache: KVCache | None = None
        self._compiled: dict[int, Any] = {}
        self._jitted = jax.jit(step, static_argnums=0, donate_argnums=2)
        self.last_tokens = jnp.zeros(shapes.num_lanes, jnp.int32)  # each lane's, of the last step dispatched
        self.compiles_after_warmup = 0
        self._warm = False

    def warm_up(self, on_compiled: OnCompiled | None = None) -> CompiledMemory:
        """Compile every bucket, largest first, then make the cache and run each step once on nothing.

        Args:
            on_compiled: told the bucket and its seconds each time one is ready.
        """
        packer = StepPacker(self.shapes)
        example = {b: packer.pack([], 0, self.last_tokens, bucket=b) for b in self.shapes.buckets}
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            jobs = [pool.submit(self._compile, example[bucket]) for bucket in reversed(self.shapes.buckets)]
            for job in as_completed(jobs):
                bucket, compiled, seconds = job.result()
                self._compiled[bucket] = compiled
                if on_compiled:
                    on_compiled(bucket, seconds)
        stats = [compiled.memory_analysis() for compiled in self._compiled.values()]
        self.reset()
        for step_input in example.values():
            jax.block_until_ready(self.dispatch(step_input))
        self._warm = True
        return CompiledMemory(
            temporaries=max(s.temp_size_in_bytes for s in stats),
            outputs=max(s.output_size_in_bytes - s.alias_size_in_bytes for s in stats),
        )

    def reset(self) -> None:
        """An empty cache, also after a device error took the old one."""
        self._kv_cache = None  # the old one goes first: there is no room for two
        self._kv_cache = self._new_cache()

    def dispatch(self, step_input: StepInput) -> StepOutput:
        """Start a step; it runs behind the steps before it, and its results can be waited for."""
        bucket = step_input.token_ids.shape[0]
        if bucket not in self._compiled:
            self.compiles_after_warmup += self._warm
            self._compiled[bucket] = self._compile(step_input)[1]
        self._kv_cache, output = self._compiled[bucket](self._params, self._kv_cache, step_input)
        self.last_tokens = output.last_tokens
        return output

    @property
    def num_compiled(self) -> int:
        """Shapes that are compiled."""
        return len(self._compiled)

    def _compile(self, step_input: StepInput) -> tuple[int, Any, float]:
        start = time.perf_counter()
        cache = jax.eval_shape(self._new_cache)
        compiled = self._jitted.lower(self._graphdef, self._params, cache, step_input).compile()
        return step_input.token_ids.shape[0], compiled, time.perf_counter() - start
