"""What a config.json means: defaults of each family, lengths, rotary settings, and refusals of what is malformed."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import LayerConfig, ModelConfig, UserError
from pagedjax.models import parse_config
from pagedjax.models.rope import inverse_frequencies, rope_angles

ROPE = json.loads((Path(__file__).parent / "golden" / "rope.json").read_text(encoding="utf-8"))["cases"]

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
KINDS = ["sliding_attention", "full_attention"] * 2
QWEN = SHAPE | {"hidden_act": "silu", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
VALID: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"hidden_act": "silu", "mlp_bias": True, "rope_scaling": LLAMA3},
    "mistral": SHAPE | {"hidden_act": "silu", "sliding_window": 8, "rope_parameters": YARN | {"rope_theta": 1e6}},
    "qwen2": QWEN | {"rope_scaling": YARN},
    "qwen3": QWEN | {"layer_types": KINDS, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "gemma3_text": SHAPE
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": KINDS,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 30.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
NEWER_GEMMA = {k: v for k, v in VALID["gemma3_text"].items() if k not in ("rope_scaling", "rope_theta")} | {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
JUNK: list[Any] = [None, "x", "", -1, 0, 0.0, 1.5, -2.5, [], [None], ["x"], {}, {"x": 1}, {"x": {}}, True, False,
        2**31, 10**400, 1e308, float("nan"), float("inf")]  # fmt: skip


def parse(family: str, **changes: Any) -> ModelConfig:
    return parse_config(VALID[family] | {"model_type": family} | changes)


def least(family: str, *without: str, **changes: Any) -> ModelConfig:
    """What the family makes of a config that states nothing but a shape without some fields."""
    stated = {k: v for k, v in SHAPE.items() if k not in without and k not in ("attention_bias",)}
    return parse_config({"model_type": family} | stated | changes)


# Lengths


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_yarn_stretches_the_original_length(style: str) -> None:
    def length(longest: int, **changes: Any) -> int:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768} | changes
        return least("qwen2", max_position_embeddings=longest, **{style: scaling}).max_model_len

    assert length(32768) == 131072  # as Qwen2.5's model card tells users to write it
    assert length(131072) == 131072  # as others publish it
    assert length(262144) == 262144
    assert length(32768, factor=2.5) == 81920
    assert length(32768, original_max_position_embeddings=None) == 131072  # then the original is what is stated


def test_linear_and_dynamic_stretch_the_stated_length() -> None:
    for kind in ("linear", "dynamic"):
        for factor, length in ((1.5, 6144), (2, 8192), (2.6, 10649)):
            scaling = {"rope_type": kind, "factor": factor}
            assert least("llama", max_position_embeddings=4096, rope_scaling=scaling).max_model_len == length


def test_some_lengths_are_stretched_already() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    stated = least("gemma3_text", max_position_embeddings=131072, rope_scaling=linear)
    assert stated.max_model_len == 131072
    assert stated.layers[-1].rope.factor == 1.0  # a layer with a window is not scaled
    assert parse("gemma3_text", max_position_embeddings=131072).layers[1].rope.factor == 8.0
    assert parse("llama", max_position_embeddings=131072).max_model_len == 131072


# Defaults


def hf_class(family: str) -> Any:
    """The family's configuration class in transformers, which needs no torch."""
    module = family.removesuffix("_text")
    name = {"gemma3_text": "Gemma3TextConfig"}.get(family, f"{family.capitalize()}Config")
    return getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), name)


def hf_view(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config, in this project's words."""
    hf = hf_class(family)(**fields)
    ropes = hf.rope_parameters
    kinds = (
        getattr(hf, "layer_types", None)
        or ["sliding_attention" if getattr(hf, "sliding_window", None) else "full_attention"] * hf.num_hidden_layers
    )
    eos = hf.eos_token_id
    return {
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": hf.intermediate_size,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": hf.num_key_value_heads,
        "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "max_model_len": hf.max_position_embeddings,
        "norm_eps": hf.rms_norm_eps,
        "tied_embeddings": hf.tie_word_embeddings,
        "bos_token_id": hf.bos_token_id,
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "windows": [hf.sliding_window if kind == "sliding_attention" else None for kind in kinds],
        "thetas": [ropes.get(kind, ropes)["rope_theta"] for kind in kinds],
    }


def own_view(config: ModelConfig, names: Iterator[str]) -> dict[str, Any]:
    layers = config.layers
    derived = {"windows": [layer.window for layer in layers], "thetas": [layer.rope.theta for layer in layers]}
    return {name: derived[name] if name in derived else getattr(config, name) for name in names}


STATED: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (tuple(VALID), {}),
    (tuple(VALID), {"num_attention_heads": 64, "hidden_size": 4096}),
    (tuple(VALID), {"eos_token_id": None, "bos_token_id": None}),
    (tuple(VALID), {"rope_theta": 5000.0, "tie_word_embeddings": True}),
    (("llama", "qwen2", "qwen3"), {"num_key_value_heads": None, "num_attention_heads": 16}),
    (("mistral", "qwen2", "qwen3"), {"sliding_window": None}),
    (("mistral", "qwen2", "qwen3", "gemma3_text"), {"sliding_window": 100}),
    (("qwen2", "qwen3"), {"use_sliding_window": True}),
    (("qwen2", "qwen3"), {"use_sliding_window": True, "max_window_layers": 1}),
    (("qwen2", "qwen3"), {"use_sliding_window": True, "sliding_window": None}),
    (("gemma3_text",), {"sliding_window_pattern": 3, "rope_local_base_freq": 20000.0}),
]


@pytest.mark.parametrize(
    ("family", "fields"),
    [pytest.param(f, fields, id=f"{f}-{','.join(fields)}") for families, fields in STATED for f in families],
)
def test_absent_and_null_mean_what_they_mean_in_transformers(family: str, fields: dict[str, Any]) -> None:
    expected = hf_view(family, fields)
    assert own_view(parse_config({"model_type": family} | fields), iter(expected)) == expected


def test_absent_and_null_windows_differ() -> None:
    assert {layer.window for layer in least("mistral").layers} == {4096}
    assert {layer.window for layer in least("mistral", sliding_window=None).layers} == {None}
    for family in ("qwen2", "qwen3"):
        on = least(family, use_sliding_window=True, max_window_layers=2)
        assert [layer.window for layer in on.layers] == [None, None, 4096, 4096]
        assert {layer.window for layer in least(family, sliding_window=8).layers} == {None}


# Malformed files


def sections(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field of an object, and of the objects in it."""
    for name, item in value.items():
        yield (*path, name)
        if isinstance(item, dict):
            yield from sections(item, (*path, name))


def changed(value: dict[str, Any], path: tuple[str, ...], new: Any) -> dict[str, Any]:
    """A copy with the field at `path` replaced, or left out where `new` is the class `object`."""
    name, *rest = path
    if rest:
        return value | {name: changed(value[name], tuple(rest), new)}
    return {k: v for k, v in value.items() if k != name} if new is object else value | {name: new}


CHANGES = [
    pytest.param(family, config, path, id=f"{family}-{'.'.join(path)}")
    for family, config in [*VALID.items(), ("gemma3_text", NEWER_GEMMA)]
    for path in sections(config)
]


@pytest.mark.parametrize(("family", "valid", "path"), CHANGES)
def test_any_one_field_may_be_junk(family: str, valid: dict[str, Any], path: tuple[str, ...]) -> None:
    parsed = 0
    for junk in [*JUNK, object]:
        raw = changed(valid, path, junk) | {"model_type": family}
        try:
            config = parse_config(raw)
        except UserError as error:
            text = str(error)
            assert "\n" not in text
            assert len(text) < 200
            assert any(name in text for name in (*path, "layer_types")), f"{junk!r}: {text}"
        else:
            parsed += 1
            assert 0 < config.max_model_len < 2**31
            assert len(config.layers) <= 10_000
            assert np.isfinite([config.norm_eps, config.attention_scale, config.embedding_scale]).all()
            for rope in {layer.rope for layer in config.layers if layer.rope.rope_type != "dynamic"}:
                frequencies, scale = inverse_frequencies(rope, config.head_dim)
                assert np.isfinite(frequencies).all(), junk
                assert np.isfinite(scale), junk
    assert parsed < len(JUNK)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks rope_scaling.low_freq_factor"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', where an object belongs"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks rope_scaling.factor"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 1024}},
            "rope_scaling.factor is 0.5",
        ),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "rope_scaling.odd = 1"),
        ("llama", {"rope_scaling": {}, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("llama", {"head_dim": 15}, "head_dim 15"),
        ("llama", {"eos_token_id": ["</s>"]}, "eos_token_id is .*, where a token id or a list of them belongs"),
        ("llama", {"vocab_size": None}, "lacks vocab_size"),
        ("qwen2", {"max_window_layers": "28"}, "max_window_layers is '28'"),
        ("qwen2", {"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types is 'full_attention', where a list belongs"),
        ("qwen3", {"layer_types": KINDS[:3]}, "layer_types has 3 entries for 4 layers"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta"),
        ("gemma3_text", {"sliding_window": None}, "lacks sliding_window"),
    ],
)
def test_refusals_name_the_field(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(family, **changes)


# Rotary


@pytest.mark.parametrize("case", ROPE, ids=lambda case: case["name"])
def test_rotary_is_transformers(case: dict[str, Any]) -> None:
    given = case["config"]
    config = least("llama", "rope_theta", **given)
    rope, position = config.layers[0].rope, case.get("length", 10) - 1
    cos, sin = (np.asarray(x)[0] for x in rope_angles(rope, given["head_dim"], jnp.asarray([position], jnp.int32)))
    frequencies = np.asarray(case["inverse_frequencies"])
    angles, scale = position * frequencies, case["attention_factor"]
    np.testing.assert_allclose(cos, np.cos(angles) * scale, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * scale, atol=2e-5)
    if rope.rope_type != "dynamic":
        own, own_scale = inverse_frequencies(rope, given["head_dim"])
        np.testing.assert_allclose(own, frequencies, rtol=1e-6)
        assert own_scale == pytest.approx(scale, rel=1e-12)


def test_rotary_without_scaling_is_the_paper_s() -> None:
    layer: LayerConfig = least("llama").layers[0]
    frequencies, scale = inverse_frequencies(layer.rope, 16)
    assert frequencies.tolist() == pytest.approx([10000 ** (-2 * i / 16) for i in range(8)], rel=1e-6)
    assert scale == 1.0


def test_every_rotary_type_has_a_case() -> None:
    assert {case["config"]["rope_parameters"]["rope_type"] for case in ROPE} == {
        "default", "linear", "dynamic", "llama3", "yarn"
    }  # fmt: skip
