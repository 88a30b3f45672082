"""The engine without its device: the same scheduler and block tables, with a model of a step's time in its place.

It goes through ``Engine.step``'s motions: plan and dispatch step N+1 while step N runs, then wait for N and commit its
tokens. What the host does for a step is hidden behind the step before, as far as that lasts.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, cast

from pagedjax.block_tables import BlockTables
from pagedjax.latency import latencies, throughput
from pagedjax.occupancy import slots_filled
from pagedjax.request import Sequence
from pagedjax.scheduler import SchedulePlan
from pagedjax.traces import PrefixKeys, TraceRequest

# Seconds that a plan's step takes on the device, and on the host.
StepTime = Callable[[SchedulePlan], tuple[float, float]]


class SchedulerLike(Protocol):
    """A scheduler, or one that is recorded (``plan_log``)."""

    @property
    def tables(self) -> BlockTables:
        """Its block tables."""

    @property
    def running(self) -> list[Sequence]:
        """In the order of turn."""

    @property
    def waiting(self) -> list[Sequence]:
        """In the order of turn."""

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of a request."""

    def schedule(self) -> SchedulePlan:
        """Plan the next step."""

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out."""


def counted_tokens(num_tokens: int) -> list[int]:
    """Tokens that are only ever counted and appended to, a byte each."""
    return cast("list[int]", bytearray(num_tokens))


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has arrived. Moments in simulated seconds."""

    arrival: float
    num_sequences: int  # that have not ended yet
    first_token: float | None = None


@dataclass(slots=True)
class _Step:
    plan: SchedulePlan
    ends: float  # on the device


@dataclass
class _Counts:
    """What adds up over steps."""

    steps: int = 0
    computed: int = 0
    recomputed: int = 0
    queried: int = 0
    hits: int = 0
    copies: int = 0
    transfers: int = 0
    output_tokens: int = 0
    host_seconds: float = 0.0
    running: int = 0
    blocks_held: int = 0
    peak_blocks_held: int = 0
    slots_filled: int = 0
    slots_held: int = 0
    preemptions: dict[str, int] = field(default_factory=lambda: {"recompute": 0, "swap": 0})


class Simulator:
    """Serves a trace in simulated time.

    Args:
        scheduler: new, or idle.
        step_time: of a plan.
        prefix_caching: whether requests share the blocks of equal beginnings; the pool must keep its blocks then.
        n: samples per request; they share its prompt's blocks.
    """

    def __init__(self, scheduler: SchedulerLike, step_time: StepTime, *, prefix_caching: bool = True, n: int = 1):
        self._scheduler, self._step_time = scheduler, step_time
        self._tables = scheduler.tables
        self._n = n
        self._prefix_keys = PrefixKeys(self._tables.block_size) if prefix_caching else None
        self._own_keys = count(-1, -1)  # of blocks that are like no other
        self._has_keys = prefix_caching or n > 1 or self._tables.swap is not None
        self._requests: dict[Sequence, _Request] = {}
        self._last_token: dict[Sequence, float] = {}
        self._in_flight: deque[_Step] = deque()
        self._now = 0.0
        self._device_free = 0.0
        self._counts = _Counts()
        self._ttft, self._tpot, self._itl, self._e2el = (array("d") for _ in range(4))

    def run(self, requests: Iterable[TraceRequest]) -> dict[str, Any]:
        """Serve the requests, each from its arrival on, to the length of its output, and return the numbers.

        Each request gives at least one token. Means of blocks held and sequences running are over steps.

        Raises:
            ValueError: a request does not fit into the pool.
        """
        began = time.perf_counter()
        scheduler = self._scheduler
        arrivals = deque(sorted(requests, key=lambda request: request.arrival))
        total, prompt_tokens = len(arrivals), sum(request.prompt_tokens for request in arrivals)
        while arrivals or self._requests or self._in_flight:
            if not (self._requests or self._in_flight):
                self._now = max(self._now, arrivals[0].arrival)
            while arrivals and arrivals[0].arrival <= self._now:
                self._add(total - len(arrivals), arrivals.popleft())
            self._step(scheduler.schedule())
        latency = latencies(ttft=self._ttft, tpot=self._tpot, itl=self._itl, e2el=self._e2el)
        numbers = throughput(total, prompt_tokens, self._counts.output_tokens, self._now)
        return numbers | latency | self._totals() | {"wall_s": round(time.perf_counter() - began, 2)}

    def _add(self, number: int, request: TraceRequest) -> None:
        keys: list[int] = []
        if self._has_keys:
            keys = self._prefix_keys.of(request) if self._prefix_keys else []
            missing = request.prompt_tokens // self._tables.block_size - len(keys)
            keys += [next(self._own_keys) for _ in range(missing)]
        sequences = [
            Sequence(
                request_id=str(number),
                index=index,
                token_ids=counted_tokens(request.prompt_tokens),
                num_prompt=request.prompt_tokens,
                max_tokens=max(1, request.output_tokens),
                root_key=0 if self._has_keys else None,
                block_keys=list(keys) if index else keys,  # type: ignore[arg-type]
            )
            for index in range(self._n)
        ]
        self._scheduler.add(*sequences)
        arrived = _Request(request.arrival, self._n)
        self._requests |= dict.fromkeys(sequences, arrived)

    def _step(self, plan: SchedulePlan) -> None:
        counts = self._counts
        before = self._in_flight.popleft() if self._in_flight else None
        assert plan.decodes or plan.prefills or plan.preemptions or before, "nothing runs, and nothing can"
        self._count(plan)
        if plan.decodes or plan.prefills:
            device_seconds, host_seconds = self._step_time(plan)
            counts.host_seconds += host_seconds
            self._now += host_seconds
            self._device_free = max(self._now, self._device_free) + device_seconds
            self._in_flight.append(_Step(plan, self._device_free))
        if before:
            self._now = max(self._now, before.ends)
            self._commit(before.plan)
            counts.steps += 1
            counts.slots_filled += slots_filled(self._tables, self._scheduler.running)
            counts.slots_held += self._tables.pool.num_held * self._tables.block_size

    def _commit(self, plan: SchedulePlan) -> None:
        """Give each sequence that was to have one its token."""
        now, last_token = self._now, self._last_token
        block_size = self._tables.block_size if self._has_keys else 0
        sampled = [share.sequence for share in plan.decodes]
        sampled += [share.sequence for share in plan.prefills if share.samples]
        for sequence in sampled:
            sequence.num_pending -= 1
            sequence.token_ids.append(0)
            known = len(sequence.token_ids)
            if block_size and not known % block_size:
                sequence.block_keys.append(next(self._own_keys))
            before = last_token.get(sequence)
            if before is not None:
                self._itl.append(now - before)
            else:
                self._first_token(self._requests[sequence])
            last_token[sequence] = now
            if known == sequence.num_prompt + sequence.max_tokens:
                self._finish(sequence)
        self._counts.output_tokens += len(sampled)

    def _first_token(self, request: _Request) -> None:
        if request.first_token is None:
            request.first_token = self._now
            self._ttft.append(self._now - request.arrival)

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        request = self._requests.pop(sequence)
        del self._last_token[sequence]
        request.num_sequences -= 1
        if not request.num_sequences:
            assert request.first_token is not None, "who ends has had a token"
            self._e2el.append(self._now - request.arrival)
            if sequence.max_tokens > 1:
                self._tpot.append((self._now - request.first_token) / (sequence.max_tokens - 1))

    def _count(self, plan: SchedulePlan) -> None:
        counts = self._counts
        for preemption in plan.preemptions:
            counts.preemptions[preemption.mode] += 1
        counts.queried += plan.queried
        counts.hits += plan.hits
        counts.copies += len(plan.copies)
        counts.transfers += len(plan.transfers)
        if not (plan.decodes or plan.prefills):
            return
        counts.computed += plan.num_tokens
        counts.recomputed += sum([share.num_again for share in plan.prefills])
        counts.recomputed += sum([share.num_again for share in plan.decodes])
        held = self._tables.pool.num_held
        counts.running += len(self._scheduler.running)
        counts.blocks_held += held
        counts.peak_blocks_held = max(counts.peak_blocks_held, held)

    def _totals(self) -> dict[str, Any]:
        counts, blocks = self._counts, self._tables.pool.num_blocks
        steps = counts.steps
        return {
            "preemptions": sum(counts.preemptions.values()),
            "preemptions_by_mode": counts.preemptions,
            "computed_tokens": counts.computed,
            "recomputed_tokens": counts.recomputed,
            "recomputed_share": round(counts.recomputed / counts.computed, 5),
            "prefix_cache_queries": counts.queried,
            "prefix_cache_hits": counts.hits,
            "cow_copies": counts.copies,
            "swap_transfers": counts.transfers,
            "running_mean": round(counts.running / steps, 2),
            "kv_usage_mean": round(counts.blocks_held / steps / blocks, 5),
            "kv_usage_peak": round(counts.peak_blocks_held / blocks, 5),
            "kv_waste": round(1 - counts.slots_filled / counts.slots_held, 5) if counts.slots_held else 0.0,
            "steps": steps,
            "host_ms_per_step": round(1000 * counts.host_seconds / steps, 4),
        }
