"""Reading a Hugging Face config.json, in its old and its new style, so that nothing in it is silently ignored."""

import math
from collections.abc import Mapping
from typing import Any

from pagedjax.config import LayerConfig, ModelConfig, RopeConfig, UserError

# These say how a model was made, trained or stored; its results do not depend on them.
_HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "auto_map",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "quantization_config_name",
        "resid_pdrop",
        "return_dict",
        "sep_token_id",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

# Each of these changes the result. Where a family does not read one itself, only these values mean "off".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_softcapping": (None, 0),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_dim": (None,),
    "attention_bias": (None, False),
    "attention_multiplier": (None,),
    "attention_out_bias": (None, False),
    "bias": (None, False),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "mup_width_multiplier": (None, 1, 1.0),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "num_nextn_predict_layers": (None, 0),
    "pretraining_tp": (None, 0, 1),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "qkv_bias": (None, False),
    "scale_depth": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "sliding_window_pattern": (None,),
    "attention_chunk_size": (None,),
    "layer_types": (None,),
    "rope_local_base_freq": (None,),
    "query_pre_attn_scalar": (None,),
    "vision_config": (None,),
    "audio_config": (None,),
    "is_encoder_decoder": (None, False),
    "cross_attention_hidden_size": (None,),
    "add_cross_attention": (None, False),
    "mlp_only_layers": (None, []),
    "tie_encoder_decoder": (None, False),
    "attention_sinks": (None,),
    "swiglu_limit": (None,),
    "llama_4_scaling": (None,),
    "norm_after": (None, False),
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


class ConfigReader:
    """A config.json being read: it knows what was asked for, and refuses by name what nobody can honour."""

    def __init__(self, raw: Mapping[str, Any]):
        self._raw = raw
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, or ``default`` where it is absent or null."""
        self._read.add(name)
        value = self._raw.get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        """The field's value.

        Raises:
            UserError: it is absent or null.
        """
        value = self.get(name)
        if value is None:
            raise UserError(f"config.json lacks {name}: take the file from the model's own publisher")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A field that is a positive whole number; required where there is no default.

        Raises:
            UserError: it is something else.
        """
        value = self.require(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"config.json: {name} is {value!r}, where a positive whole number belongs")
        return value

    def number(self, name: str, default: float) -> float:
        """A field that is a number.

        Raises:
            UserError: it is something else.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"config.json: {name} is {value!r}, where a number belongs")
        return float(value)

    def activation(self, name: str, default: str) -> str:
        """The MLP's activation in ``ModelConfig``'s words.

        Raises:
            UserError: it is one that is not supported.
        """
        value = self.get(name, default)
        if value not in _ACTIVATIONS:
            raise unsupported(name, value)
        return _ACTIVATIONS[value]

    def unread(self) -> tuple[str, ...]:
        """Names that nothing here knows, to be shown to the user.

        Raises:
            UserError: a field that changes the result was not read and is not off.
        """
        left = {name: value for name, value in self._raw.items() if name not in self._read | _HARMLESS}
        for name, value in left.items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise unsupported(name, value)
        return tuple(sorted(name for name, value in left.items() if name not in _NEUTRAL and value is not None))


def unsupported(name: str, value: object) -> UserError:
    """The error for a field whose value changes the result in a way that is not built."""
    return UserError(f"config.json: {name} = {value!r} changes the model's results and is not supported")


def read_rope(reader: ConfigReader, default_theta: float = 10000.0) -> RopeConfig:
    """Rotary settings where every layer has the same: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``."""
    parameters = dict(reader.get("rope_parameters", {}))
    scaling = dict(reader.get("rope_scaling", {}))
    theta = reader.number("rope_theta", default_theta)
    return rope_config(reader, {"rope_theta": theta, **scaling, **parameters})


def rope_config(reader: ConfigReader, fields: Mapping[str, Any]) -> RopeConfig:
    """One kind of rotary from its fields.

    Raises:
        UserError: the ``rope_type`` or a field of it is not supported, or a needed one is missing.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    kind = fields.pop("rope_type", fields.pop("type", "default"))
    fields.pop("type", None)
    longest = reader.integer("max_position_embeddings", 2048)
    original = fields.pop("original_max_position_embeddings", None) or reader.get("original_max_position_embeddings")
    config: dict[str, Any] = {"rope_type": kind, "theta": float(fields.pop("rope_theta"))}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        factor = fields.pop("factor", None)
        if factor is None and kind == "yarn" and original:
            factor = longest / original
        if not isinstance(factor, int | float) or factor < 1:
            raise UserError(f"config.json: rope_scaling of type {kind} needs a factor of at least 1, got {factor!r}")
        config["factor"] = float(factor)
    if kind in ("llama3", "yarn", "dynamic"):
        config["original_max_position"] = longest if kind == "dynamic" else int(original or longest)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            config[name] = float(fields.pop(name))
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"):
            if name in fields:
                config[name] = fields.pop(name)
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise unsupported("rope_type", kind)
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported("partial_rotary_factor", "other than 1")
    if kind != "default" and fields:
        raise unsupported(f"rope_scaling.{sorted(fields)[0]}", next(iter(fields.values())))
    return RopeConfig(**config)


def read_decoder(
    reader: ConfigReader,
    family: str,
    layers: tuple[LayerConfig, ...],
    head_dim: int | None = None,
    **own: Any,
) -> ModelConfig:
    """The fields that every family's config.json shares, and the family's ``own``.

    Raises:
        UserError: a field is missing, malformed or not supported.
    """
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", head_dim or hidden // heads)
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise UserError(f"config.json: {heads} heads of {head_dim} do not go with {kv_heads} key-value heads")
    eos = reader.get("eos_token_id", [])
    bos = reader.get("bos_token_id")
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": layers,
        "max_model_len": _max_model_len(reader, layers),
        "norm_eps": reader.number("rms_norm_eps", 1e-6),
        "activation": reader.activation("hidden_act", "silu"),
        "tied_embeddings": bool(reader.get("tie_word_embeddings", False)),
        "attention_scale": head_dim**-0.5,
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,),
        "bos_token_id": bos[0] if isinstance(bos, list) else bos,
        "dtype": str(reader.get("dtype", reader.get("torch_dtype", "bfloat16"))).removeprefix("torch."),
    }
    return ModelConfig(**(fields | own), unread=reader.unread())


def _max_model_len(reader: ConfigReader, layers: tuple[LayerConfig, ...]) -> int:
    """The greatest context in tokens: scaling of the older types stretches what the config states."""
    longest = reader.integer("max_position_embeddings", 2048)
    stretched = [layer.rope for layer in layers if layer.rope.rope_type in ("linear", "dynamic")]
    return longest * math.floor(max((rope.factor for rope in stretched), default=1.0))
