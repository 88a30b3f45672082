"""A request, the sequences it is answered with, and what the caller gets back. Plain host data: no device, no clock."""

import enum
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from pagedjax.config import SamplingParams


class SequenceState(enum.Enum):
    """Where a sequence is: queued (new or preempted), holding a lane and blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One sampled continuation of a prompt, as the scheduler sees it.

    The scheduler works with counts alone. ``num_tokens`` counts every token whose *place* is known, also the one that
    the step in flight is sampling right now (``num_pending`` is then 1); ``num_computed`` counts tokens whose K and V
    are in the cache, or will be when the step in flight ends. Scheduling lets the second catch up with the first.
    """

    request_id: str
    index: int
    token_ids: list[int]  # prompt, then output, as far as the host knows them
    num_prompt: int
    max_tokens: int  # output tokens at the most
    priority: int = 0
    state: SequenceState = SequenceState.WAITING
    num_pending: int = 0
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    lane: int = -1  # row in the device's table of last sampled tokens while running
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known or being sampled."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Output tokens known or being sampled."""
        return self.num_tokens - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens that the host knows."""
        return self.token_ids[self.num_prompt :]


@dataclass(eq=False)
class Request:
    """A prompt with its parameters and the sequences that answer it."""

    request_id: str
    prompt_token_ids: ListLike[int]
    params: SamplingParams
    sequences: list[Sequence]
    prompt: str | None = None

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(s.state is SequenceState.FINISHED for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the raw distribution.

    ``rank`` is 1 for the most likely token; ``decoded_token`` is None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(kw_only=True)
class CompletionOutput:
    """One of a request's continuations. ``finish_reason``: stop, length, abort, error, or None while it runs.

    ``stop_reason`` is the stop string or the stop token that ended it, None for end-of-sequence and length. In a
    delta (``AsyncLLM.generate(..., delta=True)``) text, token_ids and logprobs hold only what is new.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True)
class RequestMetrics:
    """Moments of a request, in seconds of ``time.monotonic()``; None where it has not come so far."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(kw_only=True)
class RequestOutput:
    """What a request has given so far, or (a delta) since the last time.

    ``prompt_logprobs`` has an entry per prompt token, None for the first; it is None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None  # why it ended with finish_reason "error"
