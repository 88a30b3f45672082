"""Reading the rotary settings of a Hugging Face config.json, and the context length that they stretch."""

from collections.abc import Mapping
from typing import Any

from pagedjax.config import RopeConfig, UserError
from pagedjax.models.hf_config import MOST, ConfigReader, unsupported

_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def read_rope(reader: ConfigReader) -> RopeConfig:
    """Rotary settings where every layer has the same: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

    Raises:
        UserError: as ``rope_config``.
    """
    scaling, parameters = reader.section("rope_scaling"), reader.section("rope_parameters")
    within = "rope_parameters" if parameters else "rope_scaling"
    return rope_config(reader, {"rope_theta": reader.number("rope_theta"), **scaling, **parameters}, within)


def rope_config(reader: ConfigReader, fields: Mapping[str, Any], within: str) -> RopeConfig:
    """One kind of rotary from its fields, which stand in the section ``within`` of the file.

    Raises:
        UserError: the ``rope_type`` or a field of it is not supported or malformed, or a needed one is missing.
    """
    rope = ConfigReader(fields, _DEFAULTS, f"{within}.")
    kind, older = rope.optional_text("rope_type"), rope.optional_text("type")
    kind = kind or older or "default"
    longest = reader.integer("max_position_embeddings")
    # Some configs have it beside the section, and there it comes first, as in transformers.
    beside, inside = (r.optional_integer("original_max_position_embeddings") for r in (reader, rope))
    original = beside or inside or longest
    config: dict[str, Any] = {"rope_type": kind, "theta": rope.number("rope_theta")}
    match kind:
        case "default":
            pass
        case "linear":
            config |= {"factor": _factor(rope, within)}
        case "dynamic":
            config |= {"factor": _factor(rope, within), "original_max_position": longest}
        case "llama3":
            config |= {"factor": _factor(rope, within), "original_max_position": original, **_llama3(rope, within)}
        case "yarn":
            config |= {"factor": _factor(rope, within, longest / original), "original_max_position": original}
            config |= _yarn(rope, within, config["theta"])
        case _:
            raise unsupported(f"{within}.rope_type", kind)
    if rope.optional_number("partial_rotary_factor", zero=True) != 1.0:
        raise unsupported(f"{within}.partial_rotary_factor", fields["partial_rotary_factor"])
    for name, value in rope.left().items():
        # Beside a plain rotary's base stand leftovers of another type, which do nothing; objects are for layer types.
        if kind != "default" or isinstance(value, dict):
            raise unsupported(f"{within}.{name}", value)
    return RopeConfig(**config)


def _factor(rope: ConfigReader, within: str, default: float | None = None) -> float:
    factor = rope.optional_number("factor") or default
    if factor is None:
        factor = rope.number("factor")  # which says that it lacks
    if factor < 1:
        raise UserError(f"config.json: {within}.factor is {factor}, where a number of at least 1 belongs")
    return factor


def _llama3(rope: ConfigReader, within: str) -> dict[str, float]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise UserError(f"config.json: {within}.low_freq_factor {low} must be below high_freq_factor {high}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(rope: ConfigReader, within: str, theta: float) -> dict[str, Any]:
    if theta <= 1:  # its logarithm divides
        raise UserError(f"config.json: {within}.rope_theta is {theta}, where yarn needs more than 1")
    return {
        "beta_fast": rope.number("beta_fast"),
        "beta_slow": rope.number("beta_slow"),
        "attention_factor": rope.optional_number("attention_factor"),
        "mscale": rope.optional_number("mscale", zero=True),
        "mscale_all_dim": rope.optional_number("mscale_all_dim", zero=True),
        "truncate": rope.flag("truncate"),
    }


def stretched_length(reader: ConfigReader, rope: RopeConfig) -> int:
    """The greatest context in tokens, where ``max_position_embeddings`` may be the length before scaling.

    Linear and dynamic scaling stretch the length that the config states. YaRN stretches the original length, and
    some publishers state the result. Llama 3's configs state the result. vLLM
    does the same, but keeps to YaRN's product where the config states more.

    Raises:
        UserError: the product is more than any position can be.
    """
    longest = reader.integer("max_position_embeddings")
    length = float(longest)
    if rope.rope_type in ("linear", "dynamic"):
        length = longest * rope.factor
    elif rope.rope_type == "yarn":
        length = max(longest, rope.original_max_position * rope.factor)
    if length > MOST:
        raise unsupported("max_position_embeddings times the rotary factor", length)
    return int(length)
