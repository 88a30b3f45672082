"""The step that a GPU would run, lowered on a machine without one."""

import jax
import jax.numpy as jnp
import pytest
from golden_models import GOLDEN

pytest.importorskip("triton", reason="the triton package is for Linux only")

from pagedjax import StepPacker, StepShapes, init_kv_cache, load_model, step, weights
from pallas_kernels.offline import compile_kernel, lower


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_the_kernels_of_a_step(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel once, in the loop over the layers, and all of them compile."""
    monkeypatch.setattr(weights, "resolve_backend", lambda name: name)
    graphdef, params, config = load_model(
        str(GOLDEN / model), dtype="bfloat16", attention_backend="pallas", show_progress=False
    )
    groups = config.cache_layout.num_groups
    shapes = StepShapes.plan(config, max_num_seqs=8, num_blocks=32 * groups, token_budget=64)
    packed = StepPacker(shapes).pack([], 0, jnp.zeros(shapes.num_lanes, jnp.int32), bucket=64)
    kv_cache = jax.eval_shape(lambda: init_kv_cache(config, shapes.num_blocks))
    kernels = lower(lambda *arrays: step(graphdef, *arrays), params, kv_cache, packed, arch="sm_90")
    names = [kernel.name for kernel in kernels]
    assert sorted(set(names)) == ["kv_cache_write", "paged_decode", "ragged_paged_attention", "reduce_segments"]
    assert len(names) == 4
    for kernel in kernels:
        assert compile_kernel(kernel, "sm_90").stack_bytes == 0
