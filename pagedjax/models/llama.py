"""Llama 1 to 3.x, and Mistral, which is Llama with a sliding window in every layer."""

from collections.abc import Iterator

from pagedjax.config import LayerConfig, ModelConfig
from pagedjax.models.hf_config import ConfigReader, num_layers, read_decoder
from pagedjax.models.hf_rope import read_rope, stretched_length
from pagedjax.models.weight_map import WeightSpec, decoder_weights

# What an absent field means is the family's own: the values of its configuration class in transformers.
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def parse_llama(reader: ConfigReader) -> ModelConfig:
    """Llama's shape from its config.json."""
    reader = reader.with_defaults(_LLAMA)
    rope = read_rope(reader)
    bias = reader.flag("attention_bias")
    return read_decoder(
        reader,
        "llama",
        (LayerConfig(window=None, rope=rope),) * num_layers(reader),
        stretched_length(reader, rope),
        activation=reader.activation("hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


def parse_mistral(reader: ConfigReader) -> ModelConfig:
    """Mistral's shape from its config.json; a null window means full attention, an absent one does not."""
    reader = reader.with_defaults(_MISTRAL)
    rope = read_rope(reader)
    return read_decoder(
        reader,
        "mistral",
        (LayerConfig(window=reader.optional_integer("sliding_window"), rope=rope),) * num_layers(reader),
        stretched_length(reader, rope),
        activation=reader.activation("hidden_act"),
    )


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """Llama's tensor names."""
    return decoder_weights(config)
