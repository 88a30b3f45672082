"""The model families: one decoder, and for each family how it differs and how its weights are named."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pagedjax.config import ModelConfig, UserError
from pagedjax.models import gemma, llama, qwen
from pagedjax.models.decoder import Decoder
from pagedjax.models.hf_config import ConfigReader
from pagedjax.models.weight_map import WeightSpec


class Family(NamedTuple):
    """How a family's config.json is read and its tensors are named."""

    parse: Callable[[ConfigReader], ModelConfig]
    weights: Callable[[ModelConfig], Iterator[WeightSpec]]


FAMILIES: Mapping[str, Family] = {
    "llama": Family(llama.parse_llama, llama.weights),
    "mistral": Family(llama.parse_mistral, llama.weights),
    "qwen2": Family(qwen.parse_qwen2, llama.weights),
    "qwen3": Family(qwen.parse_qwen3, llama.weights),
    "gemma3_text": Family(gemma.parse_gemma3, gemma.weights),
}


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A model's shape from the content of its config.json.

    Raises:
        UserError: the family or a field that changes its results is not supported; it is named.
    """
    family = str(raw.get("model_type"))
    if family not in FAMILIES:
        raise UserError(f"config.json: model_type {family!r} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[family].parse(ConfigReader(raw))


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Every parameter of the model and the checkpoint tensors it is made of."""
    return list(FAMILIES[config.family].weights(config))


__all__ = ["FAMILIES", "Decoder", "Family", "WeightSpec", "parse_config", "weight_specs"]
