"""Which tokens the next step computes. Plain deterministic Python: no clock, no device, no globals.

There is no prefill phase and no decode phase: a sequence has tokens known and tokens computed, and a plan lets the
second catch up with the first under a token budget (continuous batching with chunked prefill). The same code drives
the engine and, with a cost model in the device's place, a simulation.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from pagedjax.block_tables import BlockCopy, BlockTables
from pagedjax.request import Sequence, SequenceState
from pagedjax.swap_space import Transfer

_ORDER = attrgetter("order")


class ScheduledSequence(NamedTuple):
    """A sequence's share of one step: the tokens at ``start`` to ``start + num_tokens``.

    Those below ``first_write`` are in the cache already. ``samples`` says that the share reaches the last known token,
    so that the step draws the next one. ``num_again`` of the tokens were computed before a preemption.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    first_write: int
    samples: bool
    num_again: int


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its blocks, and how many of its tokens are nowhere else on the device.

    ``mode`` is ``swap`` where blocks of it went to the swap space, and ``recompute`` where none did.
    """

    sequence: Sequence
    num_lost: int
    mode: str


@dataclass(slots=True)
class SchedulePlan:
    """One step: decode rows first (one token each, all of them sample), then prefill chunks; of each, those that ran
    before come first, in the order of turn, and those admitted now follow.

    Before it computes anything, ``transfers`` are made and then ``copies``, each list in its order.

    Attributes:
        queried, hits: tokens of the sequences admitted, and those of them that were found computed.
    """

    decodes: list[ScheduledSequence] = field(default_factory=list)
    prefills: list[ScheduledSequence] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    queried: int = 0
    hits: int = 0

    def __iter__(self) -> Iterator[ScheduledSequence]:
        yield from self.decodes
        yield from self.prefills

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(s.num_tokens for s in self.prefills)


class Scheduler:
    """Serves sequences in turn: first come, first served, or by priority and then so.

    Blocks are taken as tokens arrive. When none is left, sequences whose turn is later are preempted, those first that
    cost least to bring back: they give their blocks up and wait, in their turn, to be computed or swapped in again. The
    first in turn is therefore never preempted while anyone else runs, and a pool that can hold one sequence of the
    greatest length serves any number of them. Who waits holds nothing.

    Args:
        tables: the block tables and the pool under them.
        max_num_seqs: sequences that may run at once (lanes).
        token_budget: tokens in one step, at least ``max_num_seqs``.
        by_priority: whether priority comes before arrival; then one that waits may also preempt those that run.
    """

    def __init__(self, tables: BlockTables, *, max_num_seqs: int, token_budget: int, by_priority: bool = False):
        if token_budget < max_num_seqs:
            raise ValueError(f"token_budget {token_budget} is below max_num_seqs {max_num_seqs}")
        self.tables, self.pool = tables, tables.pool
        self.token_budget = token_budget
        self.by_priority = by_priority
        self.waiting: list[Sequence] = []  # in the order of turn, as is
        self.running: list[Sequence] = []
        self._free_lanes = list(range(max_num_seqs - 1, -1, -1))
        self._num_admissions = 0
        self._num_arrivals = 0

    @property
    def num_free_lanes(self) -> int:
        """Sequences that may be admitted beside those that run, where blocks last."""
        return len(self._free_lanes)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a lane, or for the prompt whose blocks they will share."""
        return len(self.waiting) + sum(len(s.forks) for queue in (self.waiting, self.running) for s in queue)

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of a request, all or none. The prompt is the first one's to compute; the others fork.

        Raises:
            ValueError: one of them could not run to its end even with the whole pool to itself.
        """
        for sequence in sequences:
            length = sequence.num_prompt + sequence.max_tokens
            blocks = self.tables.most(length, keeps_history=sequence.keeps_history)
            if blocks > self.pool.num_blocks:
                raise ValueError(f"prompt and output take {blocks} blocks, and there are {self.pool.num_blocks}")
        for index, sequence in enumerate(sequences):
            priority = sequence.priority if self.by_priority else 0
            sequence.order = (priority, self._num_arrivals, index)
            self.tables.release(sequence)
        self._num_arrivals += 1
        first, *forks = sequences
        first.forks = forks
        insort(self.waiting, first, key=_ORDER)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` go on beside ``parent``, whose tokens its own begin with: in shared blocks where the parent has
        them and a lane is free, else when its turn comes."""
        child.order = (*parent.order[:2], child.index)
        child.root_key = parent.root_key
        self.tables.release(child)
        if parent.state is SequenceState.RUNNING and self._free_lanes and self.tables.fork(parent, child):
            child.num_reached = child.num_computed
            self._give_lane(child)
        else:
            child.num_reached = min(parent.num_reached, len(child.token_ids) - 1)
            child.state = SequenceState.WAITING
            insort(self.waiting, child, key=_ORDER)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its blocks are free, or cached, at once.

        A step in flight may still write into them. Steps run in order on the device, so whoever gets such a block
        next writes each of its slots later than that, and reads none before writing it.
        """
        if sequence.state is SequenceState.RUNNING:
            self.tables.register(sequence)
            self.running.remove(sequence)
            self._release_lane(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            leader = next(s for queue in (self.waiting, self.running) for s in queue if sequence in s.forks)
            leader.forks.remove(sequence)
        forks, sequence.forks = sequence.forks, []
        for heir in forks[:1]:  # somebody else computes the prompt for the rest
            heir.forks = forks[1:]
            insort(self.waiting, heir, key=_ORDER)
        self.tables.forget(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> SchedulePlan:
        """Plan the next step and account for it as done.

        Running sequences come first, in turn; waiting ones follow while lanes, blocks and budget last.
        """
        plan = SchedulePlan()
        if self.by_priority:
            self._make_way(plan)
        # Decodes have their token set aside, so that an older prompt's chunks never stop a running stream.
        wanted = [(sequence, self._wanted(sequence)) for sequence in self.running]
        budget = self.token_budget - sum(count == 1 for _, count in wanted)
        evicted = len(plan.preemptions)
        for sequence, count in wanted:
            if sequence.state is not SequenceState.RUNNING or not count:
                continue  # preempted for an earlier one just now, or done
            self.tables.register(sequence)
            is_set_aside = count == 1
            if not is_set_aside:
                count = min(self._find_more(sequence, plan), budget)
            if count and self._make_room(sequence, count, plan):
                budget -= 0 if is_set_aside else count
                self._take(sequence, count, plan)
        if len(plan.preemptions) == evicted:
            self._admit_waiting(plan, budget)
        if not (plan.decodes or plan.prefills or any(s.num_pending for s in self.running)):
            self._break_stand_off(plan)
        return plan

    def _break_stand_off(self, plan: SchedulePlan) -> None:
        """Nobody can go on: those that run wait for beams that have no place to run. The last of them makes room: it
        has given its candidates, and needs none until the search has decided."""
        first = next((s for s in self.waiting if not s.is_paused), None)
        last = next((s for s in reversed(self.running) if s.is_paused), None)
        if first is not None and last is not None:
            self._preempt(last, plan)

    def _admit_waiting(self, plan: SchedulePlan, budget: int) -> None:
        if not (self.waiting and self._free_lanes and budget):
            return
        promised = sum(map(self.tables.promised, self.running))
        while self._free_lanes and budget:
            sequence = next((s for s in self.waiting if not s.is_paused), None)
            # One that was preempted just now may have a token in the step in flight, which only its old lane will hold.
            if sequence is None or sequence.num_pending:
                return
            match = self.tables.match(sequence)
            if not self.tables.fits(sequence, match, promised):
                return  # nobody overtakes the first in line
            self.waiting.remove(sequence)
            self._give_lane(sequence)
            if sequence.root_key is not None and sequence.reads_cache:
                plan.queried += max(0, sequence.num_tokens - sequence.num_reached)
            plan.transfers += self.tables.adopt(sequence, match)
            self._count_hits(sequence, plan)
            count = min(self._wanted(sequence), budget)
            plan.copies += self.tables.grow(sequence, sequence.num_computed + count)
            budget -= count
            before = len(self.running)
            self._take(sequence, count, plan)
            promised += self.tables.promised(sequence) + (len(self.running) - before) * self.tables.num_groups

    def _wanted(self, sequence: Sequence) -> int:
        """Tokens to compute; none once every output token it may have is known or being sampled."""
        num_tokens = sequence.num_tokens
        if num_tokens - sequence.num_prompt >= sequence.max_tokens > 0 or sequence.is_paused:
            return 0
        if sequence.waits_for_token and sequence.num_pending:
            return 0
        return num_tokens - sequence.num_computed

    def _find_more(self, sequence: Sequence, plan: SchedulePlan) -> int:
        """Before a prompt's next chunk: others may have computed more of it meanwhile. What is left to compute."""
        if sequence.num_computed == len(sequence.block_tables[0]) * self.tables.block_size:
            match = self.tables.match(sequence)
            # Nothing is swapped in: that would go before the plan's copies, and might overwrite what one of them reads.
            if match.end > match.start and self.tables.is_on_device(sequence, match):
                self.tables.adopt(sequence, match)
                self._count_hits(sequence, plan)
        return self._wanted(sequence)

    def _count_hits(self, sequence: Sequence, plan: SchedulePlan) -> None:
        """What was found computed and this sequence never had before; what it had, and finds again, is no hit."""
        found = max(0, sequence.num_computed - sequence.num_reached)
        plan.hits += found
        sequence.num_cached += max(0, min(found, sequence.num_prompt - sequence.num_reached))
        sequence.num_reached += found

    def _take(self, sequence: Sequence, count: int, plan: SchedulePlan) -> None:
        start, end = sequence.num_computed, sequence.num_computed + count
        samples = end == sequence.num_tokens and sequence.max_tokens > 0
        again = min(end, sequence.num_reached) - start if start < sequence.num_reached else 0
        share = ScheduledSequence(sequence, start, count, sequence.num_stored, samples, again)
        (plan.decodes if count == 1 and samples else plan.prefills).append(share)
        sequence.num_computed = end
        if end > sequence.num_stored:
            sequence.num_stored = end
        if end > sequence.num_reached:
            sequence.num_reached = end
        sequence.num_pending += samples
        if count > 1:
            self.tables.register(sequence)
        if sequence.forks and end >= sequence.num_prompt:
            forks, sequence.forks = sequence.forks, []
            for child in forks:
                self.fork(sequence, child)

    def _make_room(self, sequence: Sequence, count: int, plan: SchedulePlan) -> bool:
        """Give the sequence blocks for ``count`` more tokens, at the expense of later ones, or of itself."""
        self.tables.slide(sequence)
        end = sequence.num_computed + count
        while missing := self.tables.missing(sequence, end):
            if missing <= self.pool.num_free:
                plan.copies += self.tables.grow(sequence, end)
                break
            victim = self._victim(sequence, missing - self.pool.num_free)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _victim(self, sequence: Sequence, missing: int) -> Sequence:
        """Of those behind ``sequence``, the one whose blocks are enough and cost least to bring back; where nobody's
        are enough, the one with the most. ``sequence`` itself if nobody behind it holds a block of its own."""
        behind = self.running[self.running.index(sequence) + 1 :]
        freed_and_cost = [(*self.tables.exclusive(s), s) for s in reversed(behind)]
        enough = [(cost, s) for freed, cost, s in freed_and_cost if freed >= missing]
        if enough:
            return min(enough, key=lambda entry: entry[0])[1]
        freed, _, most = max(freed_and_cost, key=lambda entry: entry[0], default=(0, 0, sequence))
        return most if freed else behind[-1] if behind else sequence

    def _make_way(self, plan: SchedulePlan) -> None:
        """Preempt those that run and rank below the first that waits, until it has a place or outranks nobody."""
        while self.waiting and self.running:
            first = next((s for s in self.waiting if not s.is_paused), None)
            last = self.running[-1]
            if first is None or first.order[0] >= last.order[0]:
                return
            promised = sum(self.tables.promised(s) for s in self.running)
            if self._free_lanes and self.tables.fits(first, self.tables.match(first), promised):
                return
            self._preempt(last, plan)

    def _preempt(self, sequence: Sequence, plan: SchedulePlan) -> None:
        self.tables.register(sequence)
        _, lost = self.tables.exclusive(sequence)
        transfers = self.tables.swap_out(sequence)
        plan.transfers += transfers
        plan.preemptions.append(Preemption(sequence, lost, "swap" if sequence.swapped else "recompute"))
        self.running.remove(sequence)
        self._release_lane(sequence)
        self.tables.release(sequence)
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=_ORDER)

    def _give_lane(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=_ORDER)
        sequence.state = SequenceState.RUNNING
        sequence.lane = self._free_lanes.pop()
        sequence.admission = self._num_admissions
        self._num_admissions += 1

    def _release_lane(self, sequence: Sequence) -> None:
        self._free_lanes.append(sequence.lane)
        sequence.lane = -1
