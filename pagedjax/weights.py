"""From a checkpoint to the parameters of a decoder, one tensor at a time."""

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from pagedjax.checkpoint import Checkpoint, open_checkpoint
from pagedjax.config import ModelConfig, UserError
from pagedjax.models import Decoder, WeightSpec, parse_config, weight_specs

_MOST_NAMED = 8  # tensors that an error message lists


class LoadedModel(NamedTuple):
    """A model: ``nnx.split``'s graph definition and parameters (ready for ``step``), and its configuration."""

    graphdef: Any
    params: Any
    config: ModelConfig


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    attention_backend: str = "auto",
    seed: int = 0,
    show_progress: bool = True,
) -> LoadedModel:
    """Load a model for use with ``step``.

    Args:
        model: ``demo``, a folder, a ``.gguf`` file or a hub id.
        dtype: ``bfloat16``, ``float32``, or ``auto``: bfloat16 where the machine multiplies it, else float32.
        load_format: ``auto``, ``safetensors``, ``gguf`` or ``dummy`` (random weights from config.json alone).
        attention_backend: see ``pagedjax.attention``.
        seed: of the random weights.
        show_progress: draw a bar on standard error.

    Raises:
        UserError: the model cannot be found, read or served; the message says why.
    """
    dtype = resolve_dtype(dtype)
    checkpoint = open_checkpoint(model, load_format, dtype=dtype)
    return build_model(checkpoint, dtype, attention_backend=attention_backend, seed=seed, show_progress=show_progress)


def build_model(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    attention_backend: str = "auto",
    seed: int = 0,
    show_progress: bool = True,
) -> LoadedModel:
    """The model of an open checkpoint, its weights cast to ``dtype`` on the default device.

    Raises:
        UserError: tensors are missing, unexpected or misshapen (all are counted, the first few named).
    """
    config = _with_generation_eos(parse_config(checkpoint.config), checkpoint.generation_config).replace(dtype=dtype)
    decoder = nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype), resolve_backend(attention_backend)))
    graphdef, abstract = nnx.split(decoder)
    flat = nnx.to_flat_state(abstract)
    shapes = {path: leaf.shape for path, leaf in flat}
    specs = weight_specs(config)
    if not checkpoint.is_dummy:
        _check_tensors(checkpoint, specs, shapes)
    loaded = {}
    for index, spec in enumerate(tqdm(specs, "loading weights", unit="tensor", disable=not show_progress)):
        if checkpoint.is_dummy:
            loaded[spec.path] = _random_param(config, spec, shapes[spec.path], dtype, (seed, index))
        else:
            loaded[spec.path] = _read_param(checkpoint, spec, shapes[spec.path], dtype)
    leaves = [(path, leaf.replace(value=loaded.pop(path))) for path, leaf in flat]
    return LoadedModel(graphdef, nnx.from_flat_state(leaves), config)


def resolve_dtype(dtype: str) -> str:
    """``auto`` becomes bfloat16 on accelerators and on CPUs that multiply it, and float32 elsewhere.

    Raises:
        UserError: it is another dtype.
    """
    if dtype in ("bfloat16", "float32"):
        return dtype
    if dtype != "auto":
        raise UserError(f"dtype must be auto, bfloat16 or float32, got {dtype!r}")
    return "bfloat16" if jax.default_backend() != "cpu" or _cpu_has_bfloat16() else "float32"


def resolve_backend(attention_backend: str) -> str:
    """``auto`` becomes ``pallas`` on GPUs and ``xla`` elsewhere.

    Raises:
        UserError: it is another one, or one that this machine can't run.
    """
    has_gpu = jax.default_backend() == "gpu"
    if attention_backend == "auto":
        return "pallas" if has_gpu else "xla"
    if attention_backend not in ("xla", "pallas", "pallas-interpret"):
        raise UserError(f"attention backend {attention_backend!r} is not built yet: use auto, xla or pallas")
    if attention_backend == "pallas" and not has_gpu:
        raise UserError("attention backend 'pallas' needs a GPU: use auto, or pallas-interpret for a slow trial")
    return attention_backend


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:  # no Linux: there is no other standard way to ask
        return False
    wanted = {"bf16"} if platform.machine() == "aarch64" else {"amx_bf16", "avx512_bf16"}
    return not wanted.isdisjoint(flags)


def _with_generation_eos(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    eos = generation.get("eos_token_id")
    more = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return config.replace(eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def _check_tensors(checkpoint: Checkpoint, specs: list[WeightSpec], shapes: Mapping[Any, tuple[int, ...]]) -> None:
    found = checkpoint.shapes()
    sources = [name for spec in specs for name in spec.sources]
    complaints = [f"{name} is missing" for name in sources if name not in found]
    extra = sorted(name for name in found if name not in set(sources) and not _is_derived(name))
    complaints += [f"{name} is unexpected" for name in extra]
    for spec in specs:
        if all(name in found for name in spec.sources):
            complaints += _misshapen(spec, [found[name] for name in spec.sources], shapes[spec.path])
    if complaints:
        named = "; ".join(complaints[:_MOST_NAMED])
        rest = f"; and {len(complaints) - _MOST_NAMED} more" if len(complaints) > _MOST_NAMED else ""
        raise UserError(f"{checkpoint.name}: the tensors do not fit config.json: {named}{rest}")


def _is_derived(name: str) -> bool:
    """Tensors that some files carry although they follow from others: rotary tables, and a tied head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


def _misshapen(spec: WeightSpec, found: list[tuple[int, ...]], wanted: tuple[int, ...]) -> Iterator[str]:
    turned = [shape[::-1] if spec.transpose else shape for shape in found]
    rows_differ = any(len(shape) != len(wanted) or shape[:-1] != wanted[:-1] for shape in turned)
    if rows_differ or sum(shape[-1] for shape in turned) != wanted[-1]:
        expected = wanted[::-1] if spec.transpose else wanted
        yield f"{' + '.join(spec.sources)} has shape {' + '.join(map(str, found))}, expected {expected} in all"


def _read_param(checkpoint: Checkpoint, spec: WeightSpec, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """One parameter from its tensors, side by side along the last axis; only this one is held twice meanwhile."""
    if len(spec.sources) == 1 and not spec.transpose:
        return jnp.asarray(checkpoint.read(spec.sources[0]).astype(jnp.dtype(dtype), copy=False))
    whole = np.empty(shape, jnp.dtype(dtype))
    at = 0
    for name in spec.sources:
        tensor = checkpoint.read(name).astype(whole.dtype, copy=False)
        tensor = tensor.T if spec.transpose else tensor
        # As plain bits: NumPy moves a dtype that it does not know itself one element at a time.
        bits = np.dtype(f"u{whole.dtype.itemsize}")
        whole.view(bits)[..., at : at + tensor.shape[-1]] = tensor.view(bits)
        at += tensor.shape[-1]
    return jnp.asarray(whole)


def _random_param(
    config: ModelConfig, spec: WeightSpec, shape: tuple[int, ...], dtype: str, key: tuple[int, int]
) -> jax.Array:
    """Weights as Hugging Face initialises them: normal with deviation 0.02, norms 1, biases 0."""
    if spec.path[-1] == "scale":
        return jnp.full(shape, 1.0 - config.norm_offset, dtype)
    if spec.path[-1] == "bias":
        return jnp.zeros(shape, dtype)
    rng = np.random.default_rng(key)
    return jnp.asarray((rng.standard_normal(shape, np.float32) * np.float32(0.02)).astype(jnp.dtype(dtype)))
