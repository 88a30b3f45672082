"""An engine without a device: it drives scheduler and block pool a step ahead of the tokens, and checks both.

It keeps what a device would have in each slot and in each lane, so that a block given to the wrong sequence,
a lane shared by two or a token computed from a wrong place shows up as a wrong value; and it checks every
plan against rules that it works out by itself.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from pagedjax.blocks import BlockPool
from pagedjax.request import Sequence, SequenceState
from pagedjax.scheduler import ScheduledSequence, SchedulePlan, Scheduler

WAITING, RUNNING, FINISHED = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED


@dataclass(eq=False)
class Job:
    """A request: its sequences, and after how many tokens each finds its stop condition."""

    sequences: list[Sequence]
    stops_after: int


@dataclass
class Device:
    """What each slot and each lane holds. Steps run in the order they were dispatched, at once here."""

    block_size: int
    slots: dict[tuple[int, int], tuple[str, int, int]] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)

    def run(self, shares: Iterable[ScheduledSequence]) -> list[int | None]:
        """Write the shares' tokens, look at every token they attend to, and sample."""
        shares = list(shares)
        feedback = dict(self.lanes)
        for share in shares:
            sequence = share.sequence
            for position in range(share.start, share.start + share.num_tokens):
                if position < len(sequence.token_ids):
                    token = sequence.token_ids[position]
                else:  # the step before sampled it
                    assert share.num_tokens == 1, "only a decode takes a token from its lane"
                    token = feedback[sequence.lane]
                self.slots[self._slot(sequence, position)] = (_name(sequence), position, token)
        sampled: list[int | None] = []
        for share in shares:
            sequence = share.sequence
            for position in range(share.start + share.num_tokens):
                found = self.slots.get(self._slot(sequence, position))
                assert found == (_name(sequence), position, _token(sequence, position))
            sampled.append(_token(sequence, share.start + share.num_tokens) if share.samples else None)
            if share.samples:
                self.lanes[sequence.lane] = sampled[-1] or 0
        return sampled

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self.block_size], position % self.block_size


def _name(sequence: Sequence) -> str:
    return f"{sequence.request_id}/{sequence.index}"


def _token(sequence: Sequence, position: int) -> int:
    """The token that belongs there: each sequence has its own."""
    return int(sequence.request_id) * 1_000_000 + sequence.index * 10_000 + position + 1


@dataclass
class Before:
    """What the scheduler looked like before it planned."""

    running: list[Sequence]
    computed: dict[Sequence, int]
    wanted: dict[Sequence, int]
    free: int


class SimulatedEngine:
    """Plans a step ahead and commits later, as ``Engine.step`` does, and checks each plan."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, token_budget: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_num_seqs, self.token_budget = max_num_seqs, token_budget
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool, block_size=block_size, max_num_seqs=max_num_seqs, token_budget=token_budget
        )
        self.device = Device(block_size)
        self.in_flight: deque[tuple[SchedulePlan, list[int | None]]] = deque()
        self.jobs: list[Job] = []  # unfinished, in order of arrival
        self.arrival: dict[Sequence, int] = {}
        self.admissions: set[int] = set()
        self.num_preemptions = 0

    # ---- what the engine does ----

    def add(
        self,
        num_prompt: int,
        max_tokens: int,
        *,
        n: int = 1,
        waits: bool = False,
        stops_after: int | None = None,
    ) -> Job | None:
        """None where the request is refused, as it must be if it could never run to its end."""
        request_id = str(len(self.arrival))
        job = Job([], max_tokens if stops_after is None else stops_after)
        for index in range(n):
            sequence = Sequence(request_id, index, [], num_prompt, max_tokens, waits_for_token=waits)
            sequence.token_ids.extend(_token(sequence, position) for position in range(num_prompt))
            if _blocks(num_prompt + max_tokens, self.block_size) > self.num_blocks:
                with pytest.raises(ValueError, match="blocks wanted"):
                    self.scheduler.add(sequence)
                return None
            self.scheduler.add(sequence)
            self.arrival[sequence] = len(self.arrival)
            job.sequences.append(sequence)
        self.jobs.append(job)
        return job

    def plan(self) -> SchedulePlan:
        """Plan the next step and dispatch it."""
        before = self._before()
        plan = self.scheduler.schedule()
        self._check_plan(plan, before)
        if plan.num_tokens:
            self.in_flight.append((plan, self.device.run(plan)))
        self.num_preemptions += len(plan.preemptions)
        return plan

    def commit(self, failing: Job | None = None) -> None:
        """Bring the oldest step's tokens in; ``failing`` is a request whose token raises."""
        plan, tokens = self.in_flight.popleft()
        for share, token in zip(plan, tokens, strict=True):
            sequence = share.sequence
            if share.samples:
                sequence.num_pending -= 1
            if sequence.state is FINISHED:
                continue
            job = next(job for job in self.jobs if sequence in job.sequences)
            if job is failing:
                self.end(job)
                continue
            if token is not None:
                assert token == _token(sequence, len(sequence.token_ids)), "a token for another place"
                sequence.token_ids.append(token)
                if sequence.num_known_output >= min(job.stops_after, sequence.max_tokens):
                    self._finish(job, sequence)
            elif sequence.max_tokens == 0 and share.start + share.num_tokens >= sequence.num_prompt:
                self._finish(job, sequence)

    def end(self, job: Job) -> None:
        """Abort a request, or end it with an error."""
        for sequence in list(job.sequences):
            self._finish(job, sequence)

    def step(self) -> None:
        """One turn of the engine's loop."""
        plan = self.plan()
        if self.in_flight and (not plan.num_tokens or len(self.in_flight) == 2):
            self.commit()

    def drain(self) -> int:
        """Step until all is done; the steps that took. Fails where that takes longer than it ever may."""
        # The oldest sequence is never preempted again, and moves on at the latest every second step.
        bound = 10 + 3 * sum(s.num_prompt + s.max_tokens for job in self.jobs for s in job.sequences)
        for steps in range(bound):
            if not self.jobs and not self.in_flight:
                return steps
            self.step()
            self.check()
        pytest.fail(f"still {len(self.jobs)} requests after {bound} steps")

    def _finish(self, job: Job, sequence: Sequence) -> None:
        free, held = self.pool.num_free, len(sequence.block_table)
        self.scheduler.finish(sequence)
        assert sequence.state is FINISHED
        assert sequence.block_table == []
        assert self.pool.num_free == free + held, "its blocks are free at once"
        job.sequences.remove(sequence)
        if not job.sequences:
            self.jobs.remove(job)

    # ---- what has to hold ----

    def check(self) -> None:
        """Between any two calls."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        self.pool.check_integrity([s.block_table for s in running])
        blocks = [block for s in running for block in s.block_table]
        assert len(blocks) == len(set(blocks)), "two sequences share a block"
        lanes = [s.lane for s in running]
        assert len(set(lanes)) == len(lanes) <= self.max_num_seqs
        assert set(lanes) <= set(range(self.max_num_seqs))
        for sequence in running:
            assert sequence.state is RUNNING
            assert sequence.num_computed <= sequence.num_tokens
            # On demand: never a block before there is a token for it.
            assert len(sequence.block_table) == _blocks(sequence.num_computed, self.block_size)
        for sequence in waiting:
            assert sequence.state is WAITING
            assert (sequence.block_table, sequence.lane, sequence.num_computed) == ([], -1, 0)
        unfinished = sorted((s for job in self.jobs for s in job.sequences), key=self.arrival.__getitem__)
        # First come, first served: those that run came before all that wait, whatever was preempted.
        assert [*running, *waiting] == unfinished
        pending = dict.fromkeys(unfinished, 0)
        for plan, _ in self.in_flight:
            for share in plan:
                if share.sequence in pending:
                    pending[share.sequence] += share.samples
        assert {s: s.num_pending for s in unfinished} == pending

    def _before(self) -> Before:
        running = list(self.scheduler.running)
        wanted = {}
        for sequence in running:
            left = sequence.num_tokens - sequence.num_computed
            done = 0 < sequence.max_tokens <= sequence.num_output
            wanted[sequence] = 0 if done or (sequence.waits_for_token and sequence.num_pending) else left
        return Before(running, {s: s.num_computed for s in self.arrival}, wanted, self.pool.num_free)

    def _check_plan(self, plan: SchedulePlan, before: Before) -> None:
        assert plan.num_tokens == sum(share.num_tokens for share in plan) <= self.token_budget
        shares = {share.sequence: share for share in plan}
        assert len(shares) == len(list(plan)) <= self.max_num_seqs
        for sequence, share in shares.items():
            assert sequence.state is RUNNING, "a plan holds running sequences only"
            assert share.num_tokens >= 1
            assert share.start == before.computed[sequence]
            assert share.start + share.num_tokens == sequence.num_computed
            known = sequence.num_tokens - share.samples
            assert sequence.num_computed <= known, "a token is computed that is not known yet"
            assert share.samples == (sequence.num_computed == known and sequence.max_tokens > 0)
            if sequence.max_tokens:
                assert sequence.num_output <= sequence.max_tokens, "a token too many is sampled"
            assert not (sequence.waits_for_token and known > len(sequence.token_ids))
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed
        assert all(share.num_tokens == 1 and share.samples for share in plan.decodes)
        assert not any(share.num_tokens == 1 and share.samples for share in plan.prefills)
        for part in (plan.decodes, plan.prefills):
            order = [self.arrival[share.sequence] for share in part]
            assert order == sorted(order)
        self._check_preemptions(plan, before)
        self._check_progress(plan, before, shares)

    def _check_preemptions(self, plan: SchedulePlan, before: Before) -> None:
        victims = [preemption.sequence for preemption in plan.preemptions]
        assert all(s.state is WAITING for s in victims)
        assert [p.num_lost for p in plan.preemptions] == [before.computed[s] for s in victims]
        # The youngest go, the oldest stays; those that lost their place come next.
        assert victims == before.running[::-1][: len(victims)]
        assert len(victims) < len(before.running) or not victims
        assert list(self.scheduler.waiting)[: len(victims)] == victims[::-1]
        if victims:
            assert self.scheduler.running == before.running[: -len(victims)], "nobody is admitted now"
        assert victims == self._victims_needed(before)

    def _victims_needed(self, before: Before) -> list[Sequence]:
        """Each gets the blocks of its share, oldest first, from the pool and then from the youngest."""
        victims: list[Sequence] = []
        kept, free = list(before.running), before.free
        left = self.token_budget - sum(count == 1 for count in before.wanted.values())
        for sequence in before.running:
            held = _blocks(before.computed[sequence], self.block_size)
            wanted = before.wanted[sequence]
            share = wanted if wanted == 1 else min(wanted, left)
            missing = _blocks(before.computed[sequence] + share, self.block_size) - held
            while sequence in kept and missing > free:
                victims.append(kept.pop())
                free += _blocks(before.computed[victims[-1]], self.block_size)
            if sequence in kept:
                free -= missing
                left -= share if wanted > 1 else 0
        return victims

    def _check_progress(self, plan: SchedulePlan, before: Before, shares: dict[Sequence, ScheduledSequence]) -> None:
        victims = {preemption.sequence for preemption in plan.preemptions}
        stayed = [s for s in before.running if s not in victims]
        left = self.token_budget - sum(count == 1 for count in before.wanted.values())
        for sequence in stayed:
            wanted = before.wanted[sequence]
            given = shares[sequence].num_tokens if sequence in shares else 0
            if wanted == 1:
                assert given == 1, "a decode lost its turn"
            else:  # the older prompt takes all it can
                assert given == min(wanted, left)
                left -= given
        admitted = [s for s in self.scheduler.running if s not in before.running]
        for sequence in admitted:
            assert sequence.admission not in self.admissions
            self.admissions.add(sequence.admission)
            assert shares[sequence].num_tokens == min(sequence.num_tokens - shares[sequence].samples, left)
            left -= shares[sequence].num_tokens
        promised = sum(1 + self._missing(s, s.num_tokens) for s in self.scheduler.running)
        if admitted:  # what the others' known tokens need, and one more block each, still has room
            last = admitted[-1]
            own = self._missing(last, last.num_tokens - shares[last].samples)
            others = promised - 1 - self._missing(last, last.num_tokens)
            assert others + own <= self.pool.num_free, "admitted where the next steps throw it out again"
        if self.scheduler.waiting and left and not victims and len(self.scheduler.running) < self.max_num_seqs:
            first = self.scheduler.waiting[0]
            needs = _blocks(first.num_tokens, self.block_size)
            assert needs + promised > self.pool.num_free, "the first in line had room"

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, _blocks(num_tokens, self.block_size) - len(sequence.block_table))


def _blocks(num_tokens: int, block_size: int) -> int:
    return (num_tokens + block_size - 1) // block_size
