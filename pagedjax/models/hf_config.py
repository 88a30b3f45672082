"""Reading a Hugging Face config.json, in its old and its new style, so that nothing in it is silently ignored."""

import reprlib
from collections.abc import Mapping
from typing import Any

from pagedjax.config import LayerConfig, ModelConfig, UserError

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


MOST = 2**31 - 1  # sizes, positions and token ids are 32-bit integers on the device


class ConfigReader:
    """A config.json being read: it knows what was asked for, and refuses by name what nobody can honour.

    An absent field has the family's default; null is a value of its own, which only the ``optional_`` readers take.

    Args:
        raw: the file's content.
        defaults: what an absent field means, by name.
        within: what stands before a field's name in messages, where ``raw`` is a part of the file.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, within: str = ""):
        self._raw = raw
        self._defaults = defaults or {}
        self._within = within
        self._read: set[str] = set()

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """A fresh reader of the same content, in which absent fields have these values."""
        return ConfigReader(self._raw, defaults, self._within)

    def integer(self, name: str, *, least: int = 1, most: int = MOST) -> int:
        """A field that is a whole number from ``least`` to ``most``.

        Raises:
            UserError: it is something else, or there is none.
        """
        return self._needed(name, self.optional_integer(name, least=least, most=most))

    def optional_integer(self, name: str, *, least: int = 1, most: int = MOST) -> int | None:
        """The same, or None where the field is null, or absent without a default.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._malformed(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        """A field that is a number above 0.

        Raises:
            UserError: it is something else, or there is none.
        """
        return self._needed(name, self.optional_number(name))

    def optional_number(self, name: str, *, zero: bool = False) -> float | None:
        """The same, or None where the field is null, or absent without a default; ``zero`` lets 0 pass.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Bounds well within float32, in which the device computes; NaN fails them too.
        if not is_number or not (1e-30 <= value <= 1e30 or (zero and value == 0)):
            raise self._malformed(name, value, "a number from 0 up" if zero else "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """A field that is true or false; null means its default, and without a default false.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        if value is None:
            value = self._defaults.get(name, False)
        if not isinstance(value, bool):
            raise self._malformed(name, value, "true or false")
        return value

    def optional_text(self, name: str) -> str | None:
        """A field that is a string; None where it is null or absent.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, str):
            raise self._malformed(name, value, "a string")
        return value

    def optional_list(self, name: str) -> list[Any] | None:
        """A field that is a list of anything; None where it is null or absent.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, list):
            raise self._malformed(name, value, "a list")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """A field that is an object, without its nulls; empty where it is null or absent.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        if value is not None and not isinstance(value, dict):
            raise self._malformed(name, value, "an object")
        return {key: item for key, item in (value or {}).items() if item is not None}

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A field that is a token id or a list of them; empty where it is null, or absent without a default.

        Raises:
            UserError: it is something else.
        """
        value = self._value(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MOST for i in ids):
            raise self._malformed(name, value, "a token id or a list of them")
        return tuple(ids)

    def activation(self, name: str) -> str:
        """The MLP's activation in ``ModelConfig``'s words.

        Raises:
            UserError: it is one that is not supported, or there is none.
        """
        value = self._needed(name, self.optional_text(name))
        if value not in _ACTIVATIONS:
            raise unsupported(name, value)
        return _ACTIVATIONS[value]

    def left(self) -> dict[str, Any]:
        """What was not read so far."""
        return {name: value for name, value in self._raw.items() if name not in self._read}

    def unread(self) -> tuple[str, ...]:
        """Names that nothing here knows, to be shown to the user.

        Raises:
            UserError: a field that changes the result was not read and is not off.
        """
        left = {name: value for name, value in self.left().items() if name not in _HARMLESS}
        for name, value in left.items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise unsupported(name, value)
        return tuple(sorted(name for name, value in left.items() if name not in _NEUTRAL and value is not None))

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self._raw.get(name, self._defaults.get(name))

    def _needed[T](self, name: str, value: T | None) -> T:
        if value is None:
            raise UserError(f"config.json lacks {self._within}{name}: take the file from the model's own publisher")
        return value

    def _malformed(self, name: str, value: object, wanted: str) -> UserError:
        return UserError(f"config.json: {self._within}{name} is {reprlib.repr(value)}, where {wanted} belongs")


def unsupported(name: str, value: object) -> UserError:
    """The error for a field whose value changes the result in a way that is not built."""
    return UserError(f"config.json: {name} = {reprlib.repr(value)} changes the model's results and is not supported")


def read_decoder(
    reader: ConfigReader, family: str, layers: tuple[LayerConfig, ...], max_model_len: int, **own: Any
) -> ModelConfig:
    """The fields that every family's config.json shares, and the family's ``own``.

    Raises:
        UserError: a field is missing, malformed or not supported.
    """
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.optional_integer("head_dim") or hidden // heads
    kv_heads = reader.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise UserError(
            f"config.json: num_attention_heads {heads}, head_dim {head_dim} and num_key_value_heads {kv_heads} "
            "do not go together: take the file from the model's own publisher"
        )
    bos = reader.token_ids("bos_token_id")
    dtype, older = reader.optional_text("dtype"), reader.optional_text("torch_dtype")
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": layers,
        "max_model_len": max_model_len,
        "norm_eps": reader.number("rms_norm_eps"),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "attention_scale": head_dim**-0.5,
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "bos_token_id": bos[0] if bos else None,
        "dtype": (dtype or older or "bfloat16").removeprefix("torch."),
    }
    return ModelConfig(**(fields | own), unread=reader.unread())


def num_layers(reader: ConfigReader) -> int:
    """How many layers there are; the bound is far above any model's, and keeps a broken file from filling memory.

    Raises:
        UserError: it is no such number.
    """
    return reader.integer("num_hidden_layers", most=10_000)
