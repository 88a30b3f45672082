"""Writing into the cache: the right slots, and nothing that could reach a stranger."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDEN

from pagedjax import UserError, init_kv_cache, load_model
from pagedjax.kv_cache import write_kv

BLOCKS, HEADS, SIZE, DIM = 3, 2, 4, 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_not_finite_is_clamped(dtype: str) -> None:
    """The largest float32 would be infinite again in bfloat16, and zero times infinite is NaN."""
    layer = jnp.zeros((BLOCKS, HEADS, SIZE, DIM), dtype)
    new = jnp.asarray([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38], jnp.float32) * jnp.ones((1, HEADS, 1))
    k, v = write_kv(layer, layer, new, new, jnp.asarray([5]))
    for written in (k, v):
        assert jnp.isfinite(written).all()
        assert written[1, 0, 1, 0] == jnp.finfo(dtype).max
        assert written[1, 1, 1, 1] == -jnp.finfo(dtype).max
        assert written[1, 0, 1, 2] == 0


def test_slots_and_padding() -> None:
    layer = jnp.zeros((BLOCKS, HEADS, SIZE, DIM))
    new = jnp.arange(1.0, 4.0)[:, None, None] * jnp.ones((3, HEADS, DIM))
    k, _ = write_kv(layer, layer, new, new, jnp.asarray([0, 11, BLOCKS * SIZE]))
    filled = np.asarray(k)[:, 0, :, 0].reshape(-1)
    assert filled[0] == 1
    assert filled[11] == 2
    assert filled.sum() == 3, "padding is dropped"


def test_the_cache_has_the_dtype_of_the_weights() -> None:
    for dtype in ("bfloat16", "float32"):
        _, params, config = load_model(str(GOLDEN / "llama"), dtype=dtype, show_progress=False)
        assert config.dtype == dtype
        cache = init_kv_cache(config, num_blocks=4)
        assert cache.k[0].dtype == params["embedding"][...].dtype == dtype
        assert cache.k[0].shape == (config.num_layers, 4, config.num_kv_heads, 16, config.head_dim)


def test_large_caches_are_cut_into_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model(str(GOLDEN / "llama"), dtype="float32", show_progress=False).config
    of_layer = 4 * config.num_kv_heads * 16 * config.head_dim
    monkeypatch.setattr("pagedjax.kv_cache.MAX_ARRAY_ELEMENTS", 2 * of_layer)
    assert [stack.shape[0] for stack in init_kv_cache(config, 4).k] == [2, 1]
    with pytest.raises(UserError, match="--num-kv-blocks 8"):
        init_kv_cache(config, 9)


def test_only_what_can_be_loaded_is_loaded() -> None:
    with pytest.raises(UserError, match="dtype"):
        load_model(str(GOLDEN / "llama"), dtype="float16")
    with pytest.raises(UserError, match="not built yet"):
        load_model(str(GOLDEN / "llama"), attention_backend="cpu")
    with pytest.raises(UserError, match="needs a GPU"):
        load_model(str(GOLDEN / "llama"), attention_backend="pallas")
