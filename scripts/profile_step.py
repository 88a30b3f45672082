"""Where a decode step's time goes: the whole step, and its parts by themselves in the same shapes.

    .venv/bin/python scripts/profile_step.py [--sequences 32] [--context 180]

The model is the random 100M Llama of scripts/bench_peers. Prints a table of medians in milliseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.config import SamplingParams
from pagedjax.kv_cache import write_kv
from pagedjax.models import Decoder, parse_config
from pagedjax.pack import PackedRow, StepPacker, StepShapes
from pagedjax.runner import StepRunner
from pagedjax.weights import resolve_dtype
from pagedjax.xla_attention import paged_attention_xla

LLAMA_100M = {
    "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 32000,
    "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
ROUNDS = 15


def median_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of one call, the median of some, after one that does not count."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=180)
    options = parser.parse_args()
    count, context = options.sequences, options.context
    dtype = resolve_dtype("auto")
    config = parse_config(LLAMA_100M).replace(dtype=dtype)
    graphdef, params = nnx.split(Decoder(config, jnp.dtype(dtype)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32) * 0.02, a.dtype), params)
    per_sequence = -(-(context + 1) // 16)
    shapes = StepShapes.plan(config,
        max_num_seqs=count, max_model_len=1024, block_size=16, num_blocks=count * per_sequence, token_budget=count,
    )  # fmt: skip
    runner, packer = StepRunner(graphdef, params, config, shapes, dtype), StepPacker(shapes)
    runner.warm_up()
    rows = []
    for lane in range(count):
        packer.sampling_rows.set(lane, SamplingParams(temperature=0), 1, (0, 0))
        table = list(range(lane * per_sequence, (lane + 1) * per_sequence))
        rows.append(PackedRow(lane, context - 1, [1], [table], samples=True))
    step_input = packer.pack(rows, count, runner.last_tokens)
    no_rows = packer.pack([row._replace(samples=False) for row in rows], count, runner.last_tokens)

    layers, tokens = config.num_layers, step_input.tokens.token_ids.shape[0]
    model: Decoder = nnx.merge(graphdef, params)
    layer = model.layers[0]
    x = jnp.ones((tokens, config.hidden_size))
    k_layer = jnp.zeros((shapes.num_blocks, config.num_kv_heads, 16, config.head_dim), dtype)
    q = jnp.ones((tokens, config.num_heads, config.head_dim))
    kv = jnp.ones((tokens, config.num_kv_heads, config.head_dim))

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        attended = layer.attention.qkv(x)[:, : config.num_heads * config.head_dim]
        return layer.mlp.down(layer.mlp.gate_up(layer.attention.out(attended))[:, : config.intermediate_size])

    attend = jax.jit(partial(paged_attention_xla, scale=0.125))
    write = jax.jit(write_kv, donate_argnums=(0, 1))
    caches = [k_layer + 0, k_layer + 0]

    def write_once() -> Any:
        caches[:] = write(*caches, kv, kv, step_input.tokens.slots)
        return caches

    whole = median_ms(lambda: runner.dispatch(step_input))
    forward = median_ms(lambda: runner.dispatch(no_rows).prompt)
    parts = {
        "products of the layers": layers * median_ms(lambda: products(x)),
        "attention": layers * median_ms(lambda: attend(q, k_layer, k_layer, step_input.tokens.batch)),
        "cache write": layers * median_ms(write_once),
        "head and sampling": whole - forward,
    }
    parts["norms, rotary, the rest"] = whole - sum(parts.values())
    print(f"a decode step of {count} sequences, {context} tokens of context, {dtype}: {whole:.1f} ms")
    for name, milliseconds in parts.items():
        print(f"  {name:26} {milliseconds:7.1f} ms {milliseconds / whole:6.0%}")


if __name__ == "__main__":
    main()
