"""The sequences that answer a request, and what its caller gets back. Plain host data: no device, no clock."""

import dataclasses
import enum
from dataclasses import dataclass, field

from pagedjax.block_keys import BlockKey


class SequenceState(enum.Enum):
    """Where a sequence is: queued (new or preempted), holding a lane and blocks, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# Stands in a block table where a block has left its group's window.
NO_BLOCK = -1


@dataclass(eq=False)
class Sequence:
    """One sampled continuation of a prompt, as the scheduler sees it.

    The scheduler works with counts alone. ``num_tokens`` counts every token whose *place* is known, also the one that
    a step in flight is sampling right now (``num_pending`` of them); ``num_computed`` counts tokens that a step has
    gone through, or will have when the step in flight ends. Scheduling lets the second catch up with the first.

    ``num_stored`` counts tokens whose K and V are in the cache, or will be then. It is ``num_computed``, or more where
    blocks that others have filled hold also the last known token: that one is computed for what comes after it, and
    not written.
    """

    request_id: str
    index: int
    token_ids: list[int]  # prompt, then output, as far as the host knows them
    num_prompt: int
    max_tokens: int  # output tokens at the most
    priority: int = 0  # smaller goes first, where the scheduler heeds it
    state: SequenceState = SequenceState.WAITING
    num_pending: int = 0
    num_computed: int = 0
    num_stored: int = 0
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])  # one per cache group, all equally long
    num_slid: list[int] = field(default_factory=lambda: [0])  # entries per table that have left the window
    lane: int = -1  # row in the device's table of last sampled tokens while running
    admission: int = -1  # number of the admission that gave it its lane and blocks; never used twice
    order: tuple[int, int, int] = (0, 0, 0)  # its turn: priority, arrival, index
    # Some constraints (a bad word of several tokens) need the last token's value on the host, so that the next
    # token cannot be planned while it is still being sampled.
    waits_for_token: bool = False
    is_paused: bool = False  # a beam that waits for the others of its search: nothing to compute until they agree
    forks: list["Sequence"] = field(default_factory=list)  # share its prompt's blocks as soon as it is computed
    # Sharing of blocks. Without a root key the sequence shares none but by forking.
    root_key: BlockKey | None = None
    block_keys: list[BlockKey] = field(default_factory=list)  # of its first full blocks, as far as they were wanted
    num_registered: int = 0  # full blocks that have been named in the pool
    reads_cache: bool = True  # off for prompts whose every token must be computed (prompt_logprobs)
    keeps_history: bool = False  # the first table stays whole: penalties look at every token through it
    swapped: list[tuple[int, BlockKey]] = field(default_factory=list)  # group and key of what it has in swap space
    num_cached: int = 0  # tokens of its prompt that were found computed
    num_reached: int = 0  # tokens that have ever been computed for it; what is computed below is computed again

    @property
    def num_tokens(self) -> int:
        """Tokens known or being sampled."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Output tokens known or being sampled."""
        return self.num_tokens - self.num_prompt

    @property
    def num_known_output(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt


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


class OutputCollector:
    """Joins a request's deltas into the whole output so far. ``add`` costs what is new, ``snapshot`` all of it."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._samples: dict[int, _Sample] = {}

    def add(self, delta: RequestOutput) -> None:
        """Take in what is new; ``delta`` itself stays as it is."""
        self._last = delta
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        for new in delta.outputs:
            if new.index not in self._samples:
                self._samples[new.index] = _Sample(CompletionOutput(index=new.index))
            self._samples[new.index].add(new)

    def snapshot(self) -> RequestOutput:
        """The output so far, which later deltas leave as it is; there must have been a delta."""
        assert self._last is not None, "a request without a delta has no output"
        outputs = [self._samples[index].snapshot() for index in sorted(self._samples)]
        return dataclasses.replace(self._last, outputs=outputs, prompt_logprobs=self._prompt_logprobs)


@dataclass
class _Sample:
    """One continuation as it grows: its lists in place, its text in pieces."""

    whole: CompletionOutput
    pieces: list[str] = field(default_factory=list)

    def add(self, new: CompletionOutput) -> None:
        whole = self.whole
        self.pieces.append(new.text)
        whole.token_ids.extend(new.token_ids)
        if new.cumulative_logprob is not None:
            whole.cumulative_logprob = new.cumulative_logprob
        if new.logprobs is not None:
            whole.logprobs = whole.logprobs or []
            whole.logprobs.extend(new.logprobs)
        whole.finish_reason = new.finish_reason or whole.finish_reason
        whole.stop_reason = new.stop_reason if new.stop_reason is not None else whole.stop_reason

    def snapshot(self) -> CompletionOutput:
        self.pieces = ["".join(self.pieces)]
        logprobs = None if self.whole.logprobs is None else list(self.whole.logprobs)
        token_ids = list(self.whole.token_ids)
        return dataclasses.replace(self.whole, text=self.pieces[0], token_ids=token_ids, logprobs=logprobs)
