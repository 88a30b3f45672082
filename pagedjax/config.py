"""What the user asked for: engine settings, sampling parameters and the shape of a model.

The ground floor: it imports no device library, so that the scheduler can be read, tested and simulated without one.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedjax.cache_layout import CacheLayout, cache_layout
from pagedjax.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024  # and stop tokens
MAX_SAMPLES = 128

_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)


class UserError(Exception):
    """The user can put this right.

    The message is one line and says what to do; the command line prints it and exits 2.
    """


def parse_size(text: str | int) -> int:
    """Bytes in a size such as ``512MiB``, ``2GiB``, ``1.5g`` or ``4096`` (units are powers of two).

    Raises:
        UserError: the text is not a size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if not match:
        raise UserError(f"{text!r} is not a size: write a number of bytes, or one with KiB, MiB or GiB, such as 2GiB")
    return int(float(match[1]) * _SIZE_UNITS[(match[2] or "").lower()])


def _check(name: str, holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value!r:.200}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    _check(name, _is_int(value) and low <= value <= high, f"an integer from {low} to {high}", value)  # type: ignore[operator]


def _check_float(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    rule = f"a number from {low:g} to {high:g}" if math.isfinite(high) else f"a number of at least {low:g}"
    _check(name, number and math.isfinite(value) and low <= value <= high, rule, value)  # type: ignore[arg-type, operator]


def _check_ids(name: str, value: object) -> None:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    _check(name, listed and all(_is_int(i) and i >= 0 for i in value), "a list of token ids", value)  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    Order of the pipeline: logit_bias, allowed_token_ids, bad_words, min_tokens; then repetition, frequency and
    presence penalty; then temperature, min_p, top_k, top_p. ``logprobs`` are of the raw distribution.

    Raises:
        ValueError: a value is out of its range; the message begins with the field's name.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    priority: int = 0
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words"):
            values = () if getattr(self, name) is None else getattr(self, name)
            _check(name, isinstance(values, Iterable) and not isinstance(values, str), "a list", values)
            object.__setattr__(self, name, tuple(values))
        if self.top_k == -1:  # vLLM's older way to say "off"
            object.__setattr__(self, "top_k", 0)
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, MAX_SAMPLES)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check("top_p", self.top_p > 0, "above 0", self.top_p)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        _check("repetition_penalty", self.repetition_penalty > 0, "above 0", self.repetition_penalty)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
            rule = f"at most max_tokens ({self.max_tokens})"
            _check("min_tokens", self.min_tokens <= self.max_tokens, rule, self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)

    def _check_lists(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check(name, isinstance(getattr(self, name), bool), "true or false", getattr(self, name))
        _check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings", self.stop)
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            _check(
                name,
                all(isinstance(s, str) and s for s in texts),
                "a list of strings that are not empty",
                texts,
            )
        for name in ("stop_token_ids", "bad_words"):
            values = getattr(self, name)
            _check(name, len(values) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} entries", len(values))
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids)
            _check("allowed_token_ids", len(self.allowed_token_ids) > 0, "a list that is not empty", [])
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            bias = self.logit_bias
            _check("logit_bias", isinstance(bias, dict), "an object of token ids and numbers", bias)
            _check("logit_bias", len(bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries", len(bias))
            for token, value in bias.items():
                _check("logit_bias", _is_int(token) and token >= 0, "keyed by token ids", token)
                _check_float("logit_bias", value, -100.0, 100.0)
        if self.structured_outputs is not None:
            given = self.structured_outputs
            _check("structured_outputs", isinstance(given, StructuredOutputsParams), "a StructuredOutputsParams", given)
            for name in ("allowed_token_ids", "bad_words"):
                _check(name, not getattr(self, name), "absent where structured_outputs is given", getattr(self, name))

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def num_samples(self) -> int:
        """Sequences that are sampled: ``best_of``, or ``n`` where it is not given."""
        return self.best_of or self.n


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search with Hugging Face's ``generate(num_beams=)`` semantics.

    A hypothesis scores the sum of its log-probabilities over ``length ** length_penalty``. ``early_stopping`` is
    True, False or ``"never"``: ``beam.BeamSearch`` says when each ends the search. ``max_tokens`` None means what fits.

    Raises:
        ValueError: a value is out of its range; the message begins with the field's name.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("length_penalty", self.length_penalty, -4.0, 4.0)  # (2**31) ** 4 is still a float32
        stopping = self.early_stopping
        _check("early_stopping", isinstance(stopping, bool) or stopping == "never", 'true, false or "never"', stopping)
        _check("ignore_eos", isinstance(self.ignore_eos, bool), "true or false", self.ignore_eos)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine settings; each field is a flag of the command line and a keyword of ``LLM`` (CONTRACT: Engine flags).

    ``None`` means that the engine chooses: what it chose stands in the start-up report. Sizes are in bytes or in
    text such as ``2GiB``.

    Raises:
        UserError: a value is out of its range, or names a feature that is not built yet.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    memory_utilization: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    swap_space: int | str | None = None
    preemption_mode: str | None = None
    scheduling_policy: str = "fcfs"
    tensor_parallel_size: int = 1
    speculative_config: str | None = None
    attention_backend: str = "auto"
    load_format: str = "auto"
    tokenizer: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("auto", "bfloat16", "float32"),
            "attention_backend": ("auto", "xla", "cpu", "pallas", "pallas-interpret"),
            "load_format": ("auto", "safetensors", "gguf", "orbax", "dummy"),
            "preemption_mode": (None, "recompute", "swap"),
            "scheduling_policy": ("fcfs", "priority"),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                listed = ", ".join(value for value in values if value)
                raise UserError(f"{_flag(name)} must be one of {listed}, got {getattr(self, name)!r}")
        for name in (
            "max_model_len",
            "block_size",
            "num_kv_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
        ):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise UserError(f"{_flag(name)} must be a whole number of at least 1, got {value!r}")
        if not _is_int(self.seed):
            raise UserError(f"--seed must be a whole number, got {self.seed!r}")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise UserError(f"--block-size must be 8, 16, 32, 64 or 128, got {self.block_size}")
        if self.kv_cache_memory is not None:
            object.__setattr__(self, "kv_cache_memory", parse_size(self.kv_cache_memory))
        share = self.memory_utilization
        if share is not None and not 0 < share <= 1:
            raise UserError(f"--memory-utilization must be above 0 and at most 1, got {share!r}")
        sizes = [n for n in ("num_kv_blocks", "kv_cache_memory", "memory_utilization") if getattr(self, n) is not None]
        if len(sizes) > 1:
            raise UserError(f"{' and '.join(map(_flag, sizes))} both set the cache's size: give one of them")
        if self.swap_space is not None:
            object.__setattr__(self, "swap_space", parse_size(self.swap_space))
            if self.preemption_mode == "recompute":
                raise UserError("--swap-space is for --preemption-mode swap, not recompute: leave one of them out")
        self._refuse_what_is_not_built()

    @property
    def swaps(self) -> bool:
        """Whether preempted sequences' blocks go to host memory."""
        return self.preemption_mode == "swap" or bool(self.swap_space)

    def _refuse_what_is_not_built(self) -> None:
        built = {
            "kv_cache_dtype": ("auto",),
            "quantization": (None,),
            "tensor_parallel_size": (1,),
            "speculative_config": (None,),
            "attention_backend": ("auto", "xla", "pallas", "pallas-interpret"),
        }
        for name, values in built.items():
            if getattr(self, name) not in values:
                raise UserError(f"{_flag(name)} {getattr(self, name)} is not built yet: leave the flag out")
        if self.load_format == "orbax":
            raise UserError("--load-format orbax is not built yet: use safetensors or gguf")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, as a config's ``rope_parameters`` or ``rope_scaling`` describe it.

    ``rope_type`` is one of default, linear, dynamic, llama3, yarn; lengths are in tokens.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What one decoder layer has of its own: its window (tokens, itself included; None sees all) and rotary."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model, the same fields for every family. Sizes are in elements.

    ``models.<family>.parse`` makes it from config.json.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_model_len: int
    norm_eps: float = 1e-6
    activation: str = "silu"  # or gelu_tanh
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # Gemma multiplies by (1 + weight)
    sandwich_norms: bool = False  # Gemma also norms what attention and MLP give back
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"  # of the weights: what the checkpoint says, then what they were loaded as
    unread: tuple[str, ...] = field(default=())  # names in config.json that nothing here knows

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def cache_layout(self) -> CacheLayout:
        """Which layers share a block of the cache."""
        return cache_layout(tuple(layer.window for layer in self.layers))

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
