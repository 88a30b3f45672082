"""What a benchmark runs: how many requests, how long, with which tokens, and when they come."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedjax.config import UserError
from pagedjax.traces import TraceRequest, read_trace

Lengths = tuple[int, int]  # prompt tokens, output tokens
Seed = int | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to run. Lengths are in tokens.

    Attributes:
        num_prompts: requests; with a trace, its first ones.
        input_len: of each prompt.
        output_len: of each output.
        shared_prefix_len: so many tokens at the beginning of all prompts are the same.
        trace: a file to take the lengths from instead (see ``traces.read_trace``).
        trace_scale: the trace's lengths are multiplied by it.

    Raises:
        UserError: a value is out of its range.
    """

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 64
    shared_prefix_len: int = 0
    trace: Path | None = None
    trace_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.shared_prefix_len < 0 or (self.trace is None and self.shared_prefix_len > self.input_len):
            rule = "from 0 to --input-len" if self.trace is None else "at least 0"
            raise UserError(f"--shared-prefix-len must be {rule}, got {self.shared_prefix_len}")
        if not 0 < self.trace_scale < math.inf:
            raise UserError(f"--trace-scale must be above 0, got {self.trace_scale:g}")

    def requests(self) -> list[TraceRequest]:
        """All of them; without a trace they come at once and share nothing that a trace would know of.

        Raises:
            UserError: the trace cannot be read, or is too short.
        """
        if self.trace is None:
            return [TraceRequest(0.0, self.input_len, self.output_len)] * self.num_prompts
        requests = read_trace(self.trace, self.num_prompts)
        if len(requests) < self.num_prompts:
            raise UserError(f"{self.trace} has {len(requests)} requests: give --num-prompts no more")
        return [request.scaled(self.trace_scale) for request in requests]

    def lengths(self) -> list[Lengths]:
        """Of each request.

        Raises:
            UserError: the trace cannot be read, or is too short.
        """
        return [(request.prompt_tokens, request.output_tokens) for request in self.requests()]


def clip(lengths: Sequence[Lengths], max_model_len: int) -> tuple[list[Lengths], int]:
    """Lengths that fit, the prompt shortened before the output, and how many had to be clipped."""
    fitting = (TraceRequest(0.0, *pair).clipped(max_model_len) for pair in lengths)
    clipped = [(request.prompt_tokens, request.output_tokens) for request in fitting]
    return clipped, sum(new != old for new, old in zip(clipped, lengths, strict=True))


def random_prompts(
    lengths: Sequence[Lengths], vocab_size: int, shared_prefix_len: int = 0, seed: Seed = 0
) -> list[list[int]]:
    """Token ids at random for each request's prompt, the first ``shared_prefix_len`` the same in all."""
    random = np.random.default_rng(seed)
    prefix = random.integers(vocab_size, size=shared_prefix_len).tolist()
    sizes = [prompt for prompt, _ in lengths]
    rests = [random.integers(vocab_size, size=max(0, size - shared_prefix_len)).tolist() for size in sizes]
    return [prefix[:size] + rest for size, rest in zip(sizes, rests, strict=True)]


def share_as_traced(
    prompts: Sequence[list[int]], requests: Sequence[TraceRequest], vocab_size: int, seed: Seed = 0
) -> list[list[int]]:
    """The prompts with the tokens that each of the trace's ids stands for in their places: equal ids, equal tokens.

    Args:
        prompts: token ids of each request; what no id stands for is kept.
        requests: the trace's, in the same order.
        vocab_size: ids are drawn below it.
        seed: of the draw.
    """
    random = np.random.default_rng(seed)
    drawn: dict[int, list[int]] = {}
    shared = []
    for prompt, request in zip(prompts, requests, strict=True):
        span, tokens = request.hash_tokens, list[int]()
        for place, hash_id in enumerate(request.hash_ids):
            if hash_id not in drawn:
                drawn[hash_id] = random.integers(vocab_size, size=math.ceil(span)).tolist()
            # Scaled lengths leave an id a fraction of a token; which of its places round up is the same for all.
            tokens += drawn[hash_id][: math.floor((place + 1) * span) - math.floor(place * span)]
        tokens = tokens[: len(prompt)]
        shared.append(tokens + prompt[len(tokens) :])
    return shared


def arrival_times(num_requests: int, rate: float, burstiness: float = 1.0, seed: Seed = 0) -> list[float]:
    """When requests come, in seconds after the first one, which comes at 0.

    The pauses between them are drawn from a gamma distribution of mean ``1 / rate``: what ``vllm bench serve`` draws,
    so that its settings mean the same here.

    Args:
        num_requests: at least 1.
        rate: requests per second on average; ``inf``: all at once.
        burstiness: the distribution's shape: 1 makes the arrivals a Poisson process, less makes them come in bursts,
            more makes them even. The pauses' standard deviation is ``1 / (rate * sqrt(burstiness))``.
        seed: of the draw.
    """
    pauses = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), num_requests - 1)
    return [0.0, *np.cumsum(pauses).tolist()]
