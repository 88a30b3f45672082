"""GGUF files made for the tests: any architecture, any quantisation, from arrays in Hugging Face's layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent.parent / "golden"
KINDS = GGMLQuantizationType

# Hugging Face's names, written down here a second time on purpose: the other way round, from its side.
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """A q or k projection's rows as GGUF files of llama have them: the two halves of each head in turns."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_name(name: str, gemma: bool) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{leaf}"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{(GEMMA_LAYER if gemma else LAYER)[rest]}.{leaf}"


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Writes `tensors` (GGUF's names; bytes for a type in `kinds`, float32 otherwise) and `metadata`."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoded(values: np.ndarray, kind: GGMLQuantizationType, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, the float32 values they stand for); made-up bytes where `kind` can only be dequantised."""
    try:
        raw = quantize(values, kind)
    except NotImplementedError:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block * block_bytes)
        # Below 0x3C in every byte, each float16 scale among them is finite and below one.
        raw = np.random.default_rng(seed).integers(0, 0x3C, shape, np.uint8)
    return raw, dequantize(raw, kind)


def golden_model(folder: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json, tensors) of one of the golden models."""
    return json.loads((GOLDEN / folder / "config.json").read_text()), load_file(GOLDEN / folder / "model.safetensors")


def metadata_of(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """What a GGUF file says about a model with this config."""
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if config.get("head_dim"):
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    return {f"{architecture}.{key}": value for key, value in found.items()}


def tensors_of(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], architecture: str
) -> dict[str, np.ndarray]:
    """The tensors under GGUF's names, changed as GGUF files have them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    changed = {}
    for name, values in tensors.items():
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            values = interleaved(values, heads[projection])
        if architecture == "gemma3" and projection.endswith("norm"):
            values = values + np.float32(1)
        changed[gguf_name(name, architecture == "gemma3")] = values
    return changed


def tiny_llama(
    path: Path, metadata: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """A small llama without a tokenizer: one layer, hidden 32; with further metadata and tensors."""
    draw = np.random.default_rng(7).standard_normal
    shapes = {
        "token_embd.weight": (24, 32),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.ffn_up.weight": (48, 32),
        "output_norm.weight": (32,),
    }
    sizes = {"context_length": 128, "embedding_length": 32, "block_count": 1, "feed_forward_length": 48}
    basic = {f"llama.{key}": value for key, value in sizes.items()} | {
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }
    weights = {name: draw(shape, np.float32) for name, shape in shapes.items()}
    return write_gguf(path, "llama", basic | dict(metadata or {}), weights | dict(tensors or {}))
