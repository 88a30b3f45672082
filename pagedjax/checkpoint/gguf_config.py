"""`config.json` and `generation_config.json` in Hugging Face's words, from a GGUF file's metadata."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedjax.checkpoint.gguf_file import GGUFFile
from pagedjax.checkpoint.gguf_weights import ROPE_FACTORS
from pagedjax.config import UserError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

# Keys under `ARCHITECTURE.` that do not change what the model computes.
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon"}
# The end of a turn in chat models; GGUF files often name only the end of the text.
_TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


class _Keys:
    """The metadata below `ARCHITECTURE.`, and what nobody asked for, so that it can be refused by name."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.prefix = f"{architecture}."
        self.asked: set[str] = set()

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 up; a list with one number per layer will do if they are all equal."""
        found = self.optional(name)
        value = default if found is None else found
        if value is None:
            raise self.refuse(f"its metadata lacks {self.prefix}{name}; convert the model to GGUF again")
        if type(value) is not int or value < 1:
            raise self.refuse(f"{self.prefix}{name} = {value} cannot be right; convert the model to GGUF again")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A float32 of the file as the shortest decimal that means it: 1e-06, not 9.999999974752427e-07."""
        found = self.optional(name)
        value = default if found is None else found
        if type(value) is not float:
            raise self.refuse(f"its metadata lacks a number {self.prefix}{name}; convert the model to GGUF again")
        return float(str(np.float32(value)))

    def optional(self, name: str) -> Any:
        """Whatever the file has, None if nothing; one value for a list whose values are all equal."""
        self.asked.add(name)
        value = self.file.metadata.get(self.prefix + name)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise self.refuse(f"{self.prefix}{name} differs between layers, which is not supported")
            value = value[0].item()
        return value

    def neutral(self, name: str, *values: object) -> None:
        """Accepts a key that is absent or has one of `values`, all of which change nothing."""
        value = self.optional(name)
        if value is not None and value not in values:
            raise self.refuse(f"{self.prefix}{name} = {value} is not supported")

    def refuse(self, why: str) -> UserError:
        return UserError(f"{self.file.path}: {why}")

    def finish(self) -> None:
        """Refuses, by name, the keys that nobody asked for."""
        given = {key.removeprefix(self.prefix) for key in self.file.metadata if key.startswith(self.prefix)}
        left = sorted(given - self.asked - _HARMLESS)
        if left:
            names = ", ".join(self.prefix + name for name in left)
            raise self.refuse(f"its metadata has {names}, which is not known here and so not supported")


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """The content of `config.json` (in the style of published checkpoints: `rope_theta`, `rope_scaling`).

    `dtype` is what the weights are converted to. Raises UserError, naming file and key, for an architecture
    that is not one of `ARCHITECTURES` and for anything that would change the result and is not supported.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in _FAMILIES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{file.path}: GGUF architecture {architecture!r} is not supported ({known} are)")
    kind = file.get("general.type", str) or "model"
    if kind != "model":
        raise UserError(f"{file.path} holds a {kind}, not a model; give the model's file")
    keys = _Keys(file, architecture)
    config = _common(file, keys, dtype)
    config |= _FAMILIES[architecture](file, keys, config)
    keys.finish()
    return config


def _common(file: GGUFFile, keys: _Keys, dtype: str) -> dict[str, Any]:
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise keys.refuse("tensor 'token_embd.weight' is missing; convert the model to GGUF again")
    head_dim = keys.integer("attention.key_length", keys.integer("rope.dimension_count", max(1, hidden // heads)))
    # Neither values of another size than the keys, nor heads of which only a part is rotated.
    keys.neutral("attention.value_length", head_dim)
    keys.neutral("rope.dimension_count", head_dim)
    keys.neutral("expert_count", 0)
    keys.neutral("expert_used_count", 0)
    keys.neutral("attention.causal", True)
    keys.neutral("pooling_type", 0)
    return {
        "torch_dtype": dtype,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, keys, head_dim),
        # The output projection is written only where it is not the embedding itself.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", int),
    }


def _llama(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.integer("attention.sliding_window", config["max_position_embeddings"])
    family = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if window < config["max_position_embeddings"]:
        # Mistral shares llama's name in GGUF.
        family |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return family


def _qwen2(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_sliding_window": False,
    }


def _gemma3(file: GGUFFile, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # Files that say nothing follow the family: every sixth layer sees everything.
    pattern = keys.integer("attention.sliding_window_pattern", 6)
    # Only the largest of the family (62 layers) scales its queries by hidden / heads instead of the head
    # size.
    scale = config["hidden_size"] / config["num_attention_heads"] if layers == 62 else head_dim
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scale,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": keys.optional("attn_logit_softcapping"),
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
    }


_FAMILIES = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma3": _gemma3}


def _rope_scaling(file: GGUFFile, keys: _Keys, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`: from the metadata (linear, yarn) or from llama3's tensor of factors."""
    kind = keys.optional("rope.scaling.type")
    # `scale_linear` is how old files say the same.
    old = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", old)
    original = keys.optional("rope.scaling.original_context_length")
    keys.neutral("rope.scaling.attn_factor", 1.0)
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, keys, head_dim, original)
    if factor == 1.0 or kind == "none":
        return None
    if kind == "linear" or (kind is None and factor == old):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and type(original) is int:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise keys.refuse(f"{keys.prefix}rope.scaling.type = {kind!r} with factor {factor} is not supported")


def _llama3_scaling(file: GGUFFile, keys: _Keys, head_dim: int, original: object) -> dict[str, Any] | None:
    """The llama3 parameters that give the file's divisors of the rotary frequencies, [head_dim / 2] float32.

    The file keeps only the outcome. All published models (Llama 3.1, 3.2, 3.3) share the two wavelength
    bounds and the original context; only the factor differs, and it is the largest divisor. Anything else is
    refused.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise keys.refuse(f"tensor {ROPE_FACTORS!r} has an unexpected type or shape {tensor.shape}")
    with file.path.open("rb") as handle:
        stored = np.frombuffer(os.pread(handle.fileno(), tensor.nbytes, tensor.start), "<f4")
    factor = float(stored.max())
    if np.all(stored == 1.0):
        return None
    theta = keys.number("rope.freq_base", 10000.0)
    for context in (original, 8192):
        if type(context) is int and np.allclose(stored, _llama3_divisors(theta, head_dim, factor, context), 1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise keys.refuse(f"tensor {ROPE_FACTORS!r} scales the rotary frequencies in a way that is not supported")


def _llama3_divisors(theta: float, head_dim: int, factor: float, context: int) -> np.ndarray[Any, Any]:
    """What llama3 divides each frequency by: 1 for short waves, `factor` for long ones, a blend between."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = 1.0, 4.0
    smooth = np.clip((context / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / factor + smooth)


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of `generation_config.json`: the ids that begin and end a text, as the file has them."""
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "padding")}
    ends = [ids["eos"], ids["eot"]]
    # A base model has no turns: there the same words are ordinary, unused tokens.
    if file.get("tokenizer.chat_template", str):
        tokens = file.get("tokenizer.ggml.tokens", list) or []
        ends += [index for index, token in enumerate(tokens) if token in _TURN_ENDS]
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": [index for index in dict.fromkeys(ends) if index is not None] or None,
        "pad_token_id": ids["padding"],
    }
    return {key: value for key, value in found.items() if value is not None}
