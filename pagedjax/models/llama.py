"""Llama 1 to 3.x, and Mistral, which is Llama with a sliding window in every layer."""

from collections.abc import Iterator

from pagedjax.config import LayerConfig, ModelConfig
from pagedjax.models.hf_config import ConfigReader, read_decoder, read_rope
from pagedjax.models.weight_map import WeightSpec, decoder_weights


def parse_llama(reader: ConfigReader) -> ModelConfig:
    """Llama's shape from its config.json."""
    bias = bool(reader.get("attention_bias", False))
    mlp_bias = bool(reader.get("mlp_bias", False))
    layers = (LayerConfig(window=None, rope=read_rope(reader)),) * reader.integer("num_hidden_layers")
    return read_decoder(reader, "llama", layers, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def parse_mistral(reader: ConfigReader) -> ModelConfig:
    """Mistral's shape from its config.json; a null window means full attention."""
    layer = LayerConfig(window=reader.get("sliding_window"), rope=read_rope(reader))
    return read_decoder(reader, "mistral", (layer,) * reader.integer("num_hidden_layers"))


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """Llama's tensor names."""
    return decoder_weights(config)
