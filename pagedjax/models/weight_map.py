"""How a checkpoint's tensors become the decoder's parameters, as a table.

Every family served so far names its tensors as Llama does, and differs in the names of its norms.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pagedjax.config import ModelConfig

ParameterPath = tuple[str | int, ...]


@dataclass(frozen=True)
class WeightSpec:
    """One parameter and the checkpoint tensors it is made of.

    Several sources lie side by side along the last axis of the parameter. ``transpose``: checkpoints keep a linear
    layer as ``[out, in]``, we as ``[in, out]``.
    """

    path: ParameterPath
    sources: tuple[str, ...]
    transpose: bool = False


LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def decoder_weights(config: ModelConfig, norms: Mapping[str, str] = LLAMA_NORMS) -> Iterator[WeightSpec]:
    """The parameters of a whole decoder, layer by layer."""
    yield WeightSpec(("embedding",), ("model.embed_tokens.weight",))
    for index in range(config.num_layers):
        yield from _layer_weights(config, index, norms)
    yield WeightSpec(("final_norm", "scale"), ("model.norm.weight",))
    if not config.tied_embeddings:
        yield WeightSpec(("head",), ("lm_head.weight",), transpose=True)


def _layer_weights(config: ModelConfig, index: int, norms: Mapping[str, str]) -> Iterator[WeightSpec]:
    layer: ParameterPath = ("layers", index)
    prefix = f"model.layers.{index}."
    linears = {
        ("attention", "qkv"): (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        ("attention", "out"): (("self_attn.o_proj",), config.out_bias),
        ("mlp", "gate_up"): (("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        ("mlp", "down"): (("mlp.down_proj",), config.mlp_bias),
    }
    for path, (names, bias) in linears.items():
        yield WeightSpec((*layer, *path, "kernel"), tuple(f"{prefix}{n}.weight" for n in names), transpose=True)
        if bias:
            yield WeightSpec((*layer, *path, "bias"), tuple(f"{prefix}{n}.bias" for n in names))
    for ours, theirs in norms.items():
        yield WeightSpec((*layer, ours, "scale"), (f"{prefix}{theirs}.weight",))
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield WeightSpec((*layer, "attention", norm, "scale"), (f"{prefix}self_attn.{norm}.weight",))
