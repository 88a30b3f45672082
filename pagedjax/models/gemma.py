"""Gemma 3 text: windowed and full layers mixed, each kind with a rotary base of its own, and norms on both sides."""

from collections.abc import Iterator

from pagedjax.config import LayerConfig, ModelConfig
from pagedjax.models.hf_config import ConfigReader, num_layers, read_decoder, unsupported
from pagedjax.models.hf_rope import rope_config
from pagedjax.models.qwen import layer_types
from pagedjax.models.weight_map import GEMMA_NORMS, WeightSpec, decoder_weights

# What an absent field means: the values of the family's configuration class in transformers.
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_PATTERN = 6  # every sixth layer sees all, unless the config says otherwise


def parse_gemma3(reader: ConfigReader) -> ModelConfig:
    """Gemma 3's shape from its config.json. Its ``max_position_embeddings`` is the length after rotary scaling."""
    reader = reader.with_defaults(_GEMMA3)
    newer, older = (reader.optional_integer(n) for n in ("sliding_window_pattern", "_sliding_window_pattern"))
    pattern = newer or older or _PATTERN
    kinds = layer_types(
        reader,
        ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers(reader))],
    )
    of_kind = _layers(reader)
    return read_decoder(
        reader,
        "gemma3_text",
        tuple(of_kind[kind] for kind in kinds),
        reader.integer("max_position_embeddings"),
        activation=reader.activation("hidden_activation"),
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        attention_scale=reader.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=reader.optional_number("attn_logit_softcapping"),
        final_softcap=reader.optional_number("final_logit_softcapping"),
    )


def _layers(reader: ConfigReader) -> dict[str, LayerConfig]:
    """The two kinds of layer, by their names in ``layer_types``."""
    parameters = ConfigReader(reader.section("rope_parameters"), within="rope_parameters.")
    full, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    within = "rope_parameters.full_attention" if full else "rope_scaling"
    full = {"rope_theta": reader.number("rope_theta"), **reader.section("rope_scaling"), **full}
    local = {"rope_theta": reader.number("rope_local_base_freq"), **local}
    for name, value in parameters.left().items():
        raise unsupported(f"rope_parameters.{name}", value)
    return {
        "full_attention": LayerConfig(window=None, rope=rope_config(reader, full, within)),
        "sliding_attention": LayerConfig(
            window=reader.integer("sliding_window"),
            rope=rope_config(reader, local, "rope_parameters.sliding_attention"),
        ),
    }


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """Gemma's tensor names."""
    return decoder_weights(config, GEMMA_NORMS)
