"""The PagedAttention paper's memory experiments (arXiv 2309.06180), on this project's scheduler and block tables.

One loop serves a Poisson stream in simulated time: plan a step, look at the memory, let the step's time pass, commit
its tokens. What is held, filled and shared is read off the pool and the block tables.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.contiguous import ContiguousTables
from pagedjax.occupancy import slots_filled
from pagedjax.request import Sequence
from pagedjax.scheduler import SchedulePlan, Scheduler
from pagedjax.simulator import counted_tokens
from pagedjax.step_time import StepFeatures, step_features
from pagedjax.traces import TraceRequest

GIB = 2**30
MAX_MODEL_LEN = 2048  # of OPT
MAX_NUM_SEQS, TOKEN_BUDGET = 256, 2560
ALLOCATORS = ("max", "pow2", "oracle", "paged")
BANDWIDTH, PEAK_FLOPS = 1.555e12, 312e12  # bytes/s and 16-bit FLOP/s of an A100-40GB (NVIDIA's data sheet)
FLOPS_SHARE = 0.5


@dataclass(frozen=True)
class Opt:
    """An OPT model (arXiv 2205.01068, table 1) in 16 bits."""

    layers: int
    hidden: int

    @property
    def parameters(self) -> int:
        """Embeddings of 50,272 tokens and 2,050 positions, and twelve squares and thirteen vectors in each layer."""
        return (50272 + 2050) * self.hidden + self.layers * (12 * self.hidden**2 + 13 * self.hidden)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.hidden * 2


OPT_13B, OPT_66B, OPT_175B = Opt(40, 5120), Opt(64, 9216), Opt(96, 12288)
KV_SLOTS = 12 * GIB // OPT_13B.slot_bytes  # table 1: 12 GB for the cache beside OPT-13B on one A100-40GB


def step_seconds(plan: SchedulePlan, bandwidth_share: float) -> float:
    """Seconds of an OPT-13B step on an A100-40GB, by the roofline; reading and computing do not overlap."""
    features: StepFeatures = step_features(plan)
    read = 2 * OPT_13B.parameters + OPT_13B.slot_bytes * features.decode_context
    flops = 2 * OPT_13B.parameters * features.padded_tokens
    return read / (BANDWIDTH * bandwidth_share) + flops / (PEAK_FLOPS * FLOPS_SHARE)


@dataclass(frozen=True)
class LogNormal:
    """Prompt and output lengths, independent and log-normal; pairs beyond the model's length are drawn anew.

    The means are those of what is kept; the sigmas, of the logarithms, those of what is drawn.
    """

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Lengths of ``count`` requests."""
        sigmas = np.array([self.prompt_sigma, self.output_sigma])
        drawn = np.maximum(1, np.rint(self._medians * np.exp(sigmas * rng.standard_normal((2 * count + 100, 2)))))
        kept = drawn[drawn.sum(axis=1) <= MAX_MODEL_LEN][:count].astype(int)
        return [(int(prompt), int(output)) for prompt, output in kept]

    @cached_property
    def _medians(self) -> npt.NDArray[np.float64]:
        """Medians to draw with, so that the means of what is kept are the ones wanted: a fixed point, since rejecting
        long pairs lowers both."""
        wanted = np.array([self.prompt_mean, self.output_mean])
        sigmas = np.array([self.prompt_sigma, self.output_sigma])
        factors = np.exp(sigmas * np.random.default_rng(1).standard_normal((200_000, 2)))
        medians = wanted * np.exp(-(sigmas**2) / 2)
        for _ in range(20):
            lengths = np.maximum(1, np.rint(medians * factors))
            medians *= wanted / lengths[lengths.sum(axis=1) <= MAX_MODEL_LEN].mean(axis=0)
        return medians


@dataclass(frozen=True)
class Recorded:
    """Lengths of recorded requests, drawn with replacement and cut to the model's length."""

    requests: tuple[TraceRequest, ...]

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Lengths of ``count`` requests."""
        drawn = (self.requests[i].clipped(MAX_MODEL_LEN) for i in rng.integers(len(self.requests), size=count))
        return [(max(1, request.prompt_tokens), max(1, request.output_tokens)) for request in drawn]


Lengths = LogNormal | Recorded


@dataclass
class Usage:
    """What was seen of the memory, one entry per step that counts."""

    running: list[int] = field(default_factory=list)
    parts: list[tuple[float, float, float, float]] = field(default_factory=list)  # of all slots; they add up to 1
    filled: list[float] = field(default_factory=list)  # slots with a token, of held ones
    saved: list[float] = field(default_factory=list)  # blocks saved by sharing, of those without sharing
    preemptions: int = 0

    def see(self, tables: BlockTables, running: list[Sequence]) -> None:
        """Add a step: token states, room for tokens to come, room that no token will fill, and the rest."""
        total = tables.pool.num_blocks * tables.block_size
        held = tables.pool.num_held * tables.block_size
        if not held:
            return
        if isinstance(tables, ContiguousTables):
            filled = sum(s.num_stored for s in running)
            to_come = sum(s.num_prompt + s.max_tokens - s.num_stored for s in running)
            reserved = sum(tables.reserved(s.num_prompt, s.max_tokens) for s in running)
        else:
            filled, to_come, reserved = slots_filled(tables, running), 0, held
        parts = (filled, to_come, reserved - filled - to_come, total - reserved)
        self.running.append(len(running))
        self.parts.append((parts[0] / total, parts[1] / total, parts[2] / total, parts[3] / total))
        self.filled.append(filled / held)
        self.saved.append(1 - tables.pool.num_held / sum(len(s.block_tables[0]) for s in running))


@dataclass(eq=False)
class Group:
    """The sequences that answer one request."""

    sequences: list[Sequence]
    is_search: bool


def parents(rng: np.random.Generator, width: int, stay: float, sharpness: float = 1.0) -> list[int]:
    """Which beam each of ``width`` new beams goes on from.

    A new beam goes on from the old one in its place with probability ``stay``; otherwise it draws a parent from the
    softmax of ``sharpness`` times standard normal scores, drawn anew in each step.
    """
    weights = np.exp(sharpness * rng.standard_normal(width))
    drawn = rng.choice(width, size=width, p=weights / weights.sum())
    return [int(parent) for parent in np.where(rng.random(width) < stay, np.arange(width), drawn)]


class Server:
    """Serves requests on a scheduler in simulated time.

    Args:
        scheduler: idle.
        seconds: of a plan's step.
        n: sequences per request, which fork once the prompt is computed.
        stay: None for parallel samples; for a beam search of width ``n``, what ``parents`` takes.
    """

    def __init__(
        self, scheduler: Scheduler, seconds: Callable[[SchedulePlan], float], *, n: int = 1, stay: float | None = None
    ):
        self.scheduler, self.seconds, self.n, self.stay = scheduler, seconds, n, stay
        self.usage = Usage()
        self._rng = np.random.default_rng(2)
        self._groups: dict[Sequence, Group] = {}
        self._num_sequences = 0

    def run(self, requests: Iterable[TraceRequest]) -> Usage:
        """Serve all; look from the tenth part of the arrivals on to the last: before that the pool fills up, after it
        the queue runs out."""
        arrivals, now = deque(requests), 0.0
        first = arrivals[len(arrivals) // 10].arrival
        while arrivals or self._groups:
            if not self._groups:
                now = max(now, arrivals[0].arrival)
            while arrivals and arrivals[0].arrival <= now:
                self._start(arrivals.popleft())
            plan = self.scheduler.schedule()
            assert plan.decodes or plan.prefills or plan.preemptions, "nothing runs, and nothing can"
            self.usage.preemptions += len(plan.preemptions)
            if arrivals and now >= first:
                self.usage.see(self.scheduler.tables, self.scheduler.running)
            now += self.seconds(plan)
            self._commit(plan)
        return self.usage

    def _start(self, request: TraceRequest) -> None:
        count = 1 if self.stay is not None else self.n
        group = Group([], self.stay is not None)
        for _ in range(count):
            tokens = counted_tokens(request.prompt_tokens)
            self._sequence(group, tokens, request.prompt_tokens, request.output_tokens)
        self.scheduler.add(*group.sequences)

    def _sequence(self, group: Group, tokens: list[int], num_prompt: int, max_tokens: int) -> Sequence:
        self._num_sequences += 1
        sequence = Sequence("", self._num_sequences, tokens, num_prompt, max_tokens)
        sequence.waits_for_token = group.is_search
        group.sequences.append(sequence)
        self._groups[sequence] = group
        return sequence

    def _commit(self, plan: SchedulePlan) -> None:
        searches: dict[Group, None] = {}
        for share in plan:
            if not share.samples:
                continue
            sequence = share.sequence
            sequence.num_pending -= 1
            group = self._groups[sequence]
            if group.is_search:
                sequence.is_paused = True
                searches[group] = None
            else:
                sequence.token_ids.append(0)
                if sequence.num_known_output == sequence.max_tokens:
                    self._finish(sequence)
        for group in searches:
            if all(beam.is_paused for beam in group.sequences):
                self._advance(group)

    def _advance(self, group: Group) -> None:
        """Every beam has its candidates: drop those that nobody goes on from, fork those that several go on from."""
        beams = group.sequences
        if beams[0].num_known_output + 1 == beams[0].max_tokens:
            for beam in beams:
                self._finish(beam)
            return
        assert self.stay is not None, "a search has it"
        chosen = parents(self._rng, self.n, self.stay) if len(beams) > 1 else [0] * self.n
        group.sequences = []
        for index, beam in enumerate(beams):
            if index not in chosen:
                self._finish(beam)
        for index in dict.fromkeys(chosen):
            parent = beams[index]
            parent.is_paused = False
            parent.token_ids.append(0)
            group.sequences.append(parent)
            for _ in range(chosen.count(index) - 1):
                child = self._sequence(group, parent.token_ids[:], parent.num_prompt, parent.max_tokens)
                self.scheduler.fork(parent, child)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self._groups[sequence]


def serve(
    lengths: Lengths,
    rate: float,
    count: int,
    *,
    allocator: str = "paged",
    block_size: int = 16,
    n: int = 1,
    stay: float | None = None,
    bandwidth_share: float = 1.0,
) -> Usage:
    """Serve ``count`` requests, ``rate`` of them a second, with the KV memory of OPT-13B on one A100-40GB."""
    rng = np.random.default_rng(0)  # the same requests for every allocator
    arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    pairs = lengths.draw(count, rng)
    requests = [TraceRequest(arrival, *pair) for arrival, pair in zip(arrivals, pairs, strict=True)]
    num_blocks = KV_SLOTS // block_size
    if allocator == "paged":
        pool = BlockPool(num_blocks, keeps=False)
        tables = BlockTables(pool, block_size=block_size, chunk=TOKEN_BUDGET)
    else:
        tables = ContiguousTables(
            num_blocks, block_size=block_size, kind=allocator, max_model_len=MAX_MODEL_LEN, chunk=TOKEN_BUDGET
        )
    scheduler = Scheduler(tables, max_num_seqs=MAX_NUM_SEQS, token_budget=TOKEN_BUDGET)
    server = Server(scheduler, lambda plan: step_seconds(plan, bandwidth_share), n=n, stay=stay)
    usage = server.run(requests)
    assert tables.pool.num_held == 0, "everything was given back"
    return usage
