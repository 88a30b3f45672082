"""Gemma 3 text: windowed and full layers mixed, each kind with a rotary base of its own, and norms on both sides."""

from collections.abc import Iterator

from pagedjax.config import LayerConfig, ModelConfig
from pagedjax.models.hf_config import ConfigReader, read_decoder, rope_config
from pagedjax.models.qwen import layer_types
from pagedjax.models.weight_map import GEMMA_NORMS, WeightSpec, decoder_weights


def parse_gemma3(reader: ConfigReader) -> ModelConfig:
    """Gemma 3's shape from its config.json."""
    count = reader.integer("num_hidden_layers")
    pattern = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    kinds = layer_types(
        reader, ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    )
    parameters = reader.get("rope_parameters", {})
    full = {"rope_theta": reader.number("rope_theta", 1_000_000.0), **reader.get("rope_scaling", {})}
    local = {"rope_theta": reader.number("rope_local_base_freq", 10_000.0)}
    of_kind = {
        "full_attention": LayerConfig(
            window=None, rope=rope_config(reader, full | parameters.get("full_attention", {}))
        ),
        "sliding_attention": LayerConfig(
            window=reader.integer("sliding_window", 4096),
            rope=rope_config(reader, local | parameters.get("sliding_attention", {})),
        ),
    }
    return read_decoder(
        reader,
        "gemma3_text",
        tuple(of_kind[kind] for kind in kinds),
        head_dim=256,
        activation=reader.activation("hidden_activation", "gelu_pytorch_tanh"),
        tied_embeddings=bool(reader.get("tie_word_embeddings", True)),
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=reader.integer("hidden_size") ** 0.5,
        attention_scale=reader.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=reader.get("attn_logit_softcapping"),
        final_softcap=reader.get("final_logit_softcapping"),
    )


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """Gemma's tensor names."""
    return decoder_weights(config, GEMMA_NORMS)
