"""Qwen2, Qwen2.5 (biases on query, key and value) and Qwen3 (a norm on each query and key head instead)."""

from typing import Any

from pagedjax.config import LayerConfig, ModelConfig, UserError
from pagedjax.models.hf_config import ConfigReader, num_layers, read_decoder, unsupported
from pagedjax.models.hf_rope import read_rope, stretched_length

# What an absent field means: the values of the families' configuration classes in transformers.
_QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3 = _QWEN2 | {"head_dim": 128}


def parse_qwen2(reader: ConfigReader) -> ModelConfig:
    """Qwen2's and Qwen2.5's shape from their config.json."""
    return _parse(reader.with_defaults(_QWEN2), "qwen2", qkv_bias=True)


def parse_qwen3(reader: ConfigReader) -> ModelConfig:
    """Qwen3's shape from its config.json."""
    reader = reader.with_defaults(_QWEN3)
    bias = reader.flag("attention_bias")
    return _parse(reader, "qwen3", qk_norm=True, qkv_bias=bias, out_bias=bias)


def _parse(reader: ConfigReader, family: str, **own: Any) -> ModelConfig:
    """With windows on, the layers from ``max_window_layers`` up have them, unless ``layer_types`` says which."""
    count, rope = num_layers(reader), read_rope(reader)
    window, first = reader.optional_integer("sliding_window"), reader.integer("max_window_layers", least=0)
    if not reader.flag("use_sliding_window"):
        window = None
    kinds = layer_types(
        reader, ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    )
    layers = tuple(LayerConfig(window=window if kind == "sliding_attention" else None, rope=rope) for kind in kinds)
    length, activation = stretched_length(reader, rope), reader.activation("hidden_act")
    return read_decoder(reader, family, layers, length, activation=activation, **own)


def layer_types(reader: ConfigReader, derived: list[str]) -> list[str]:
    """``layer_types`` where the config has it, else what was derived for it.

    Raises:
        UserError: a type other than sliding and full attention, or a list of another length than the layers.
    """
    kinds = reader.optional_list("layer_types")
    if kinds is None:
        return derived
    if len(kinds) != len(derived):
        raise UserError(f"config.json: layer_types has {len(kinds)} entries for {len(derived)} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise unsupported("layer_types", kind)
    return kinds
