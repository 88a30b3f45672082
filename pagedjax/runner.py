"""The device end of the engine: parameters, cache, and the compiled programs, one per bucket of tokens or of rows."""

import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.config import ModelConfig
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.pack import StepPacker, StepShapes
from pagedjax.step import PromptLogprobs, RowInput, StepInput, StepOutput, TokenInput, forward, sample_rows
from pagedjax.swap_space import Transfer
from pagedjax.swap_store import SwapStore

# Compiling is mostly single-threaded C++ that lets other Python threads run.
COMPILE_THREADS = 2

OnCompiled = Callable[[str, float], None]
Forwarded = tuple[jax.Array, PromptLogprobs]  # hidden states of the tokens after which one is sampled; the prompt's


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
        swap_blocks: slots of the swap space.
    """

    def __init__(
        self, graphdef: Any, params: Any, config: ModelConfig, shapes: StepShapes, dtype: str, swap_blocks: int = 0
    ):
        self.shapes = shapes
        self.windows = config.cache_layout.windows
        self._graphdef = graphdef
        # As a plain list: taking an nnx state apart is Python's work, at every step, for every parameter.
        self._params, self._params_tree = jax.tree.flatten(params)
        self._new_cache = partial(init_kv_cache, config, shapes.num_blocks, shapes.block_size, dtype)
        self._kv_cache: KVCache | None = None
        self._forward: dict[int, Any] = {}  # by tokens
        self._sample: dict[int, Any] = {}  # by rows
        self._swap = SwapStore(swap_blocks, jax.eval_shape(self._new_cache)) if swap_blocks else None
        hidden = (shapes.num_lanes, config.hidden_size)
        self._hidden = jax.ShapeDtypeStruct(hidden, jnp.float32)
        self.last_tokens = jnp.zeros(shapes.num_lanes, jnp.int32)  # each lane's, of the last step dispatched

    def warm_up(self, on_compiled: OnCompiled | None = None) -> CompiledMemory:
        """Make the cache, compile every shape, the largest first, and run a step on nothing.

        Args:
            on_compiled: told the shape and its seconds each time one is ready.
        """
        self.reset()  # filled in the background, while Python traces
        packer, shapes = StepPacker(self.shapes), self.shapes
        steps = [
            packer.pack([], 0, self.last_tokens, bucket=b, row_bucket=shapes.row_buckets[0]) for b in shapes.buckets
        ]
        steps += [
            packer.pack([], 0, self.last_tokens, bucket=shapes.buckets[0], row_bucket=r) for r in shapes.row_buckets[1:]
        ]
        forwards = {s.tokens.token_ids.shape[0]: partial(self._lower_forward, s.tokens) for s in steps}
        samples = {s.rows.lanes.shape[0]: partial(self._lower_sample, s.rows) for s in steps}
        pool = ThreadPoolExecutor(COMPILE_THREADS)
        try:
            jobs = {}
            for name, table, programs in (("tokens", self._forward, forwards), ("rows", self._sample, samples)):
                for size in sorted(programs, reverse=True):
                    # Tracing is Python and stays in one thread; two would only take the interpreter from each other.
                    jobs[pool.submit(_compile, programs[size]())] = (name, table, size)
            for job in as_completed(jobs):
                name, table, size = jobs[job]
                table[size], seconds = job.result()
                if on_compiled:
                    on_compiled(f"{size} {name}", seconds)
        finally:  # after Ctrl-C nothing more is begun
            pool.shutdown(wait=False, cancel_futures=True)
        if self._swap:
            self._swap.warm_up()
        stats = [compiled.memory_analysis() for compiled in (*self._forward.values(), *self._sample.values())]
        jax.block_until_ready(self.dispatch(steps[0]))  # the smallest; none of the others has anything left to do
        return CompiledMemory(
            temporaries=max(s.temp_size_in_bytes for s in stats),
            outputs=max(s.output_size_in_bytes - s.alias_size_in_bytes for s in stats),
        )

    def reset(self) -> None:
        """An empty cache and no last tokens, also after a device error took the old ones."""
        self._kv_cache = None  # the old one goes first: there is no room for two
        self._kv_cache = self._new_cache()
        self.last_tokens = jnp.zeros(self.shapes.num_lanes, jnp.int32)

    def swap(self, transfers: ListLike[Transfer]) -> None:
        """Move blocks to and from the swap space, in order, behind the steps before and ahead of the next."""
        assert self._swap is not None, "transfers need swap space"
        assert self._kv_cache is not None, "there is a cache after warm-up"
        self._kv_cache = self._swap.move(self._kv_cache, transfers)

    def dispatch(self, step_input: StepInput) -> StepOutput:
        """Start a step; it runs behind the steps before it, and its results can be waited for."""
        return self.sample(step_input, self.forward(step_input))

    def forward(self, step_input: StepInput) -> Forwarded:
        """Start a step's larger part; `sample` has to follow before the next step."""
        tokens = step_input.tokens
        size = tokens.token_ids.shape[0]
        if size not in self._forward:
            self._forward[size], _ = _compile(self._lower_forward(tokens))
        self._kv_cache, hidden, prompt = self._forward[size](
            self._params, self._kv_cache, tokens, step_input.last_tokens
        )
        return hidden, prompt

    def sample(self, step_input: StepInput, forwarded: Forwarded) -> StepOutput:
        """Start the other part of a step: its rows may say by now what they did not know at `forward`."""
        (hidden, prompt), rows = forwarded, step_input.rows
        num_rows = rows.lanes.shape[0]
        if not num_rows:  # a prompt's chunk, and nothing to sample: the head is spared
            return StepOutput(None, prompt, step_input.last_tokens)
        assert self._kv_cache is not None, "forward comes first"
        if num_rows not in self._sample:
            self._sample[num_rows], _ = _compile(self._lower_sample(rows))
        samples, self.last_tokens = self._sample[num_rows](
            self._params, self._kv_cache.token_ids, hidden, rows, step_input.last_tokens
        )
        return StepOutput(samples, prompt, self.last_tokens)

    @property
    def num_compiled(self) -> int:
        """Shapes that are compiled."""
        return len(self._forward) + len(self._sample) + (self._swap.num_compiled if self._swap else 0)

    def _lower_forward(self, tokens: TokenInput) -> Any:
        def run(params: list[jax.Array], kv_cache: KVCache, tokens: TokenInput, last_tokens: jax.Array) -> Any:
            return forward(self._graphdef, jax.tree.unflatten(self._params_tree, params), kv_cache, tokens, last_tokens)

        cache = jax.eval_shape(self._new_cache)
        return jax.jit(run, donate_argnums=1).lower(self._params, cache, tokens, self.last_tokens)

    def _lower_sample(self, rows: RowInput) -> Any:
        def run(params: list[jax.Array], *inputs: Any) -> Any:
            return sample_rows(self._graphdef, jax.tree.unflatten(self._params_tree, params), *inputs)

        token_ids = jax.eval_shape(self._new_cache).token_ids
        return jax.jit(run).lower(self._params, token_ids, self._hidden, rows, self.last_tokens)


def _compile(lowered: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start
