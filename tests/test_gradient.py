"""Gradients: through a whole step's log-probabilities, and through attention alone, on every backend."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDEN, cases

from pagedjax import PackedRow, StepPacker, StepShapes, init_kv_cache, load_model, step
from pagedjax.attention import attention_backend
from pagedjax.attention_batch import AttentionBatch
from pallas_kernels import reference


def prompt_logprob(name: str, backend: str, samples: bool) -> tuple[Any, Any]:
    """The function of the parameters that gives the prompt's log-probability, and the parameters."""
    graphdef, params, config = load_model(
        str(GOLDEN / name), dtype="float32", attention_backend=backend, show_progress=False
    )
    groups = config.cache_layout.num_groups
    shapes = StepShapes.plan(
        config, max_num_seqs=8, max_model_len=64, block_size=16, num_blocks=8 * groups, token_budget=64
    )
    prompt = cases(name)[1].prompt
    tables = [[4 * group + i for i in range(4)] for group in range(groups)]
    row = PackedRow(0, 0, prompt, tables, samples=samples, prompt_targets=prompt[1:])
    packed = StepPacker(shapes).pack([row], 0, jnp.zeros(shapes.num_lanes, jnp.int32))
    kv_cache = init_kv_cache(config, shapes.num_blocks, 16, "float32")

    def logprob(params: Any) -> jax.Array:
        _, out = step(graphdef, params, kv_cache, packed)
        return jnp.sum(out.prompt.logprobs[: len(prompt) - 1]) + out.prompt.top_logprobs[5, 0]

    return jax.jit(logprob), params


@pytest.mark.parametrize(
    ("name", "backend", "samples"),
    [
        ("llama", "xla", True),
        ("gemma3_text", "xla", False),
        ("llama", "pallas-interpret", False),
        ("gemma3_text", "pallas-interpret", True),
    ],
)
def test_through_a_step(name: str, backend: str, samples: bool) -> None:
    """Backwards, forwards, and by a difference: along random directions in every kind of parameter."""
    function, params = prompt_logprob(name, backend, samples)
    gradient = jax.tree.leaves(jax.jit(jax.grad(function))(params))
    forwards = jax.jit(lambda direction: jax.jvp(function, (params,), (direction,))[1])
    leaves, tree = jax.tree.flatten(params)
    chance, epsilon = np.random.default_rng(0), 3e-3
    for index in range(0, len(leaves), 3):
        direction = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
        direction[index] = chance.standard_normal(leaves[index].shape).astype(np.float32)
        direction[index] /= np.linalg.norm(direction[index])
        ahead, behind = (
            function(jax.tree.unflatten(tree, [x + sign * epsilon * d for x, d in zip(leaves, direction, strict=True)]))
            for sign in (1, -1)
        )
        backwards = np.vdot(gradient[index], direction[index])
        np.testing.assert_allclose(backwards, forwards(jax.tree.unflatten(tree, direction)), rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(backwards, (ahead - behind) / (2 * epsilon), rtol=0.05, atol=0.02)
        assert abs(backwards) > 0


@pytest.mark.parametrize("backend", ["xla", "pallas-interpret"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 2.0), (9, 2.0)])
def test_through_attention(backend: str, window: int | None, softcap: float | None) -> None:
    """Of a ragged batch, decode rows and padding in it, against the derivative of the specification."""
    chance = np.random.default_rng(1)
    q, cotangent = (jnp.asarray(chance.standard_normal((64, 6, 16)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(chance.standard_normal((40, 2, 8, 16)), jnp.float32) for _ in range(2))
    tables = jnp.asarray(chance.permutation(40).reshape(8, 5), jnp.int32)
    lens = jnp.asarray([17, 1, 40, 33, 20, 0, 0, 0], jnp.int32)
    starts = jnp.asarray([0, 1, 2, 3, 36, 50, 50, 50, 50], jnp.int32)
    batch = AttentionBatch(tables, starts, lens, jnp.asarray(3), jnp.asarray(5))
    at = None if window is None else jnp.asarray(window)
    options: dict[str, Any] = {"scale": 0.3, "window": at, "softcap": softcap}
    attend = partial(attention_backend(backend), batch=batch, **options)
    expected = partial(reference.ragged_paged_attention, block_tables=tables, cu_q_lens=starts, kv_lens=lens, **options)
    is_row = (jnp.arange(64) < 50)[:, None, None]

    def loss(function: Any, *arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_row, function(*arrays), 0.0) * cotangent)

    found = jax.jit(jax.grad(partial(loss, attend), argnums=(0, 1, 2)))(q, k, v)
    wanted = jax.jit(jax.grad(partial(loss, expected), argnums=(0, 1, 2)))(q, k, v)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert np.abs(theirs).max() > 0.1
