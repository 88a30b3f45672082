"""GGUF files: what comes out has to be what went in, and what cannot be read is refused by name."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint.tiny_gguf import (
    KINDS,
    encoded,
    golden_model,
    interleaved,
    metadata_of,
    tensors_of,
    tiny_llama,
    write_gguf,
)
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedjax.checkpoint import open_checkpoint
from pagedjax.checkpoint.gguf_config import _llama3_divisors, generation_config, model_config
from pagedjax.checkpoint.gguf_file import read_gguf
from pagedjax.config import UserError


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


@pytest.mark.parametrize(
    ("folder", "architecture"),
    [
        ("llama", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma3_text", "gemma3"),
    ],
)
def test_a_golden_model_survives_the_way_through_gguf(
    folder: str, architecture: str, tmp_path: Path, cache: Path
) -> None:
    config, tensors = golden_model(folder)
    metadata = metadata_of(config, architecture)
    if architecture == "gemma3":
        metadata["gemma3.attention.sliding_window_pattern"] = 3
    path = write_gguf(tmp_path / "model.gguf", architecture, metadata, tensors_of(config, tensors, architecture))

    opened = open_checkpoint(str(path), dtype="float32", progress=silent)

    assert opened.name == "model"
    assert opened.tokenizer_dir is None
    assert opened.names() == tensors.keys()
    for name, values in tensors.items():
        # Subtracting what was added costs the last bit or two of a norm near zero.
        tolerance = 2e-7 if architecture == "gemma3" and "norm" in name else 0
        np.testing.assert_allclose(opened.read(name), values, rtol=0, atol=tolerance)
    known = {
        *(
            "model_type",
            "architectures",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
        ),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
        *("rope_scaling", "rope_local_base_freq", "tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("hidden_act", "hidden_activation", "layer_types", "sliding_window", "query_pre_attn_scalar"),
    }
    rope = config.get("rope_parameters") or {}
    expected = {"rope_scaling": None} | {key: config[key] for key in known & config.keys()}
    expected |= {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
    if config.get("use_sliding_window") is False:
        # Null, and full attention everywhere: what their absence means too.
        expected = {key: value for key, value in expected.items() if key not in ("sliding_window", "layer_types")}
    assert {key: opened.config.get(key, "absent") for key in expected} == expected


@pytest.mark.parametrize(
    "kind",
    [
        KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1,
        KINDS.Q2_K, KINDS.Q3_K, KINDS.Q4_K, KINDS.Q5_K, KINDS.Q6_K, KINDS.IQ4_NL, KINDS.IQ4_XS,
        KINDS.IQ2_XXS, KINDS.IQ3_S, KINDS.TQ1_0,
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_quantisation_is_undone(kind: GGMLQuantizationType, dtype: str, tmp_path: Path, cache: Path) -> None:
    heads, kv_heads, hidden = 4, 2, 256
    draw = np.random.default_rng(3).standard_normal
    shapes = {
        "token_embd.weight": (3000, hidden),  # more than one piece of work
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (kv_heads * 64, hidden),
        "blk.0.ffn_down.weight": (hidden, 512),
    }
    raw, values = {}, {}
    for name, shape in shapes.items():
        raw[name], values[name] = encoded(draw(shape, np.float32), kind)
    kinds: dict[str, GGMLQuantizationType] = dict.fromkeys(shapes, kind)
    metadata = {
        "llama.context_length": 64,
        "llama.embedding_length": hidden,
        "llama.block_count": 1,
        "llama.feed_forward_length": 512,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    opened = open_checkpoint(
        str(write_gguf(tmp_path / "m.gguf", "llama", metadata, raw, kinds)), dtype=dtype, progress=silent
    )
    stored = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    layer = "model.layers.0."
    np.testing.assert_array_equal(opened.read("model.embed_tokens.weight"), values["token_embd.weight"].astype(stored))
    np.testing.assert_array_equal(
        opened.read(layer + "mlp.down_proj.weight"), values["blk.0.ffn_down.weight"].astype(stored)
    )
    # Here the values in the file are the given ones, so what is read has to be interleaved to equal them.
    for short, count in (("q", heads), ("k", kv_heads)):
        rows = opened.read(f"{layer}self_attn.{short}_proj.weight")
        assert rows.dtype == stored
        np.testing.assert_array_equal(interleaved(rows, count), values[f"blk.0.attn_{short}.weight"].astype(stored))


def test_biases_of_rotated_projections_are_put_in_order_too(tmp_path: Path, cache: Path) -> None:
    bias = np.arange(32, dtype=np.float32)
    path = tiny_llama(tmp_path / "m.gguf", tensors={"blk.0.attn_q.bias": interleaved(bias, 4)})
    opened = open_checkpoint(str(path), dtype="float32", progress=silent)
    np.testing.assert_array_equal(opened.read("model.layers.0.self_attn.q_proj.bias"), bias)
    assert opened.config["attention_bias"] is True


def test_an_output_projection_unties_the_embedding(tmp_path: Path, cache: Path) -> None:
    tied = tiny_llama(tmp_path / "tied.gguf")
    untied = tiny_llama(tmp_path / "untied.gguf", tensors={"output.weight": np.ones((24, 32), np.float32)})
    assert open_checkpoint(str(tied), progress=silent).config["tie_word_embeddings"] is True
    opened = open_checkpoint(str(untied), progress=silent)
    assert opened.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in opened.names()


def test_progress_reaches_the_whole_and_the_converted_model_opens_as_dummy_too(tmp_path: Path, cache: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    seen: list[tuple[int, int]] = []
    opened = open_checkpoint(str(path), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == 4 * sum(int(np.prod(shape)) for shape in opened.shapes().values())
    dummy = open_checkpoint(str(path), "dummy", progress=silent)
    assert dummy.is_dummy
    assert dummy.names() == frozenset()
    assert dummy.config == opened.config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_the_frequency_divisors(factor: float, tmp_path: Path) -> None:
    theta, head_dim = 500000.0, 8
    divisors = _llama3_divisors(theta, head_dim, factor, 8192).astype(np.float32)
    # By hand: the shortest wave is left alone, the longest is stretched by the whole factor.
    assert (divisors[0], divisors[-1]) == (1.0, factor)
    path = tiny_llama(tmp_path / "m.gguf", {"llama.rope.freq_base": theta}, {"rope_freqs.weight": divisors})
    assert model_config(read_gguf(path), "float32")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_of_the_metadata(keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", {f"llama.{key}": value for key, value in keys.items()})
    assert model_config(read_gguf(path), "float32")["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "dimension_count"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
        ({"llama.attention.value_length": 4}, "value_length"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv"),
        ({"llama.feed_forward_length": "wide"}, "feed_forward_length"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"general.type": "adapter"}, "adapter"),
        ({"split.count": 3}, "llama-gguf-split"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "bert"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "chatglm", "tokenizer.ggml.tokens": ["a"]},
            "chatglm",
        ),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    keys: dict[str, Any], named: str, tmp_path: Path, cache: Path
) -> None:
    path = tiny_llama(tmp_path / "m.gguf", keys)
    with pytest.raises(UserError, match=named) as caught:
        open_checkpoint(str(path), progress=silent)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(left.suffix == ".lock" for left in cache.glob("gguf/*"))


def test_unknown_architectures_tensors_and_frequency_divisors_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    falcon = write_gguf(tmp_path / "f.gguf", "falcon", {}, {"token_embd.weight": np.ones((2, 32), np.float32)})
    with pytest.raises(UserError, match="'falcon'"):
        open_checkpoint(str(falcon), progress=silent)
    odd = tiny_llama(tmp_path / "o.gguf", tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(UserError, match="attn_sinks"):
        open_checkpoint(str(odd), progress=silent)
    bent = tiny_llama(tmp_path / "b.gguf", tensors={"rope_freqs.weight": np.array([1, 9, 1, 3], np.float32)})
    with pytest.raises(UserError, match="rope_freqs"):
        open_checkpoint(str(bent), progress=silent)


def test_ends_of_text_and_of_turn(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": ["<s>", "</s>", "<|im_end|>", "x"], "tokenizer.ggml.eos_token_id": 1}
    base = tiny_llama(tmp_path / "base.gguf", tokens | {"tokenizer.ggml.bos_token_id": 0})
    assert generation_config(read_gguf(base)) == {"bos_token_id": 0, "eos_token_id": [1]}
    chat = tiny_llama(tmp_path / "chat.gguf", tokens | {"tokenizer.chat_template": "{{ messages }}"})
    assert generation_config(read_gguf(chat)) == {"eos_token_id": [1, 2]}
    named = tiny_llama(tmp_path / "named.gguf", tokens | {"tokenizer.ggml.eot_token_id": 3})
    assert generation_config(read_gguf(named)) == {"eos_token_id": [1, 3]}


def test_a_truncated_file_is_refused_at_any_length(tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "m.gguf", {"tokenizer.ggml.tokens": ["a", "bc"] * 12}).read_bytes()
    cut = tmp_path / "cut.gguf"
    # Every length of the head, then steps through the data up to the last byte.
    for length in [*range(0, 1200, 7), *range(1200, len(whole), 501), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"truncated|no GGUF file"):
            read_gguf(cut)
    cut.write_bytes(whole)
    assert len(read_gguf(cut).tensors) == 5


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_head_never_gives_anything_but_a_user_error(data: st.DataObject, tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a"], "split.count": 1}
    whole = bytearray(tiny_llama(tmp_path / "m.gguf", tokens).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 1199))] = data.draw(st.integers(0, 255))
    bent = tmp_path / "bent.gguf"
    bent.write_bytes(whole)
    with suppress(UserError):
        config = model_config(read_gguf(bent), "float32")
        assert config["vocab_size"] > 0


def test_other_versions_and_other_files_are_refused(tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "m.gguf").read_bytes()
    for version in (b"\x01\x00\x00\x00", b"\x00\x00\x00\x03"):
        (tmp_path / "v.gguf").write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(UserError, match="version"):
            read_gguf(tmp_path / "v.gguf")
    (tmp_path / "z.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UserError, match="no GGUF file"):
        read_gguf(tmp_path / "z.gguf")


def test_a_tensor_type_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", tensors={"blk.0.attn_v.weight": np.ones((16, 32), np.int8)})
    with pytest.raises(UserError, match=r"attn_v.*another quantisation"):
        read_gguf(path)
