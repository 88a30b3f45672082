"""Qwen2, Qwen2.5 (biases on query, key and value) and Qwen3 (a norm on each query and key head instead)."""

from pagedjax.config import LayerConfig, ModelConfig, UserError
from pagedjax.models.hf_config import ConfigReader, read_decoder, read_rope, unsupported


def parse_qwen2(reader: ConfigReader) -> ModelConfig:
    """Qwen2's and Qwen2.5's shape from their config.json."""
    return read_decoder(reader, "qwen2", _layers(reader), qkv_bias=True)


def parse_qwen3(reader: ConfigReader) -> ModelConfig:
    """Qwen3's shape from its config.json."""
    bias = bool(reader.get("attention_bias", False))
    return read_decoder(reader, "qwen3", _layers(reader), head_dim=128, qk_norm=True, qkv_bias=bias, out_bias=bias)


def _layers(reader: ConfigReader) -> tuple[LayerConfig, ...]:
    """With windows on, the layers from ``max_window_layers`` up have them, unless ``layer_types`` says which."""
    count, rope = reader.integer("num_hidden_layers"), read_rope(reader)
    window = reader.get("sliding_window")
    if not reader.get("use_sliding_window", False):
        window = None
    first = reader.get("max_window_layers", 28)
    derived = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    kinds = layer_types(reader, derived)
    return tuple(LayerConfig(window=window if kind == "sliding_attention" else None, rope=rope) for kind in kinds)


def layer_types(reader: ConfigReader, derived: list[str]) -> list[str]:
    """``layer_types`` where the config has it, else what was derived for it.

    Raises:
        UserError: a type other than sliding and full attention, or a list of another length than the layers.
    """
    kinds: list[str] = reader.get("layer_types", derived)
    if len(kinds) != len(derived):
        raise UserError(f"config.json: layer_types has {len(kinds)} entries for {len(derived)} layers")
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise unsupported("layer_types", kind)
    return kinds
