"""Which tokens the next step computes. Plain deterministic Python: no clock, no device, no globals.

There is no prefill phase and no decode phase: a sequence has tokens known and tokens computed, and a plan lets the
second catch up with the first under a token budget (continuous batching with chunked prefill). The same code drives
the engine and, with a cost model in the device's place, a simulation.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagedjax.blocks import BlockPool
from pagedjax.request import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's share of one step: the tokens at ``start`` to ``start + num_tokens``.

    ``samples`` says that the share reaches the last known token, so that the step draws the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Preemption:
    """A sequence that lost its blocks, and how many of its tokens must be computed again."""

    sequence: Sequence
    num_lost: int


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """One step: decode rows first (one token each, all of them sample), then prefill chunks, each in arrival order."""

    decodes: tuple[ScheduledSequence, ...]
    prefills: tuple[ScheduledSequence, ...]
    preemptions: tuple[Preemption, ...]

    def __iter__(self) -> Iterator[ScheduledSequence]:
        yield from self.decodes
        yield from self.prefills

    def only(self, sequences: Iterable[Sequence]) -> "SchedulePlan":
        """The plan without the shares of other sequences."""
        kept = set(sequences)
        return SchedulePlan(
            tuple(share for share in self.decodes if share.sequence in kept),
            tuple(share for share in self.prefills if share.sequence in kept),
            self.preemptions,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(s.num_tokens for s in self.prefills)


class Scheduler:
    """First come, first served, over a block pool.

    Blocks are taken as tokens arrive. When none is left, the youngest running sequence is preempted: it gives its
    blocks back and waits, first in line, to be computed again. The oldest is therefore never preempted while anyone
    else runs, and a pool that can hold one sequence of the greatest length serves any number of them.

    Args:
        pool: the blocks.
        block_size: slots in a block.
        max_num_seqs: sequences that may run at once (lanes).
        token_budget: tokens in one step, at least ``max_num_seqs``.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_seqs: int, token_budget: int):
        if token_budget < max_num_seqs:
            raise ValueError(f"token_budget {token_budget} is below max_num_seqs {max_num_seqs}")
        self.pool = pool
        self.block_size = block_size
        self.token_budget = token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in arrival order
        self._free_lanes = list(range(max_num_seqs - 1, -1, -1))
        self._num_admissions = 0

    @property
    def num_free_lanes(self) -> int:
        """Sequences that may be admitted beside those that run, where blocks last."""
        return len(self._free_lanes)

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none.

        Raises:
            ValueError: one of them could not run to its end even with the whole pool to itself.
        """
        for sequence in sequences:
            blocks = self._blocks_for(sequence.num_prompt + sequence.max_tokens)
            if blocks > self.pool.num_blocks:
                raise ValueError(f"{blocks} blocks wanted, the pool has {self.pool.num_blocks}")
        self.waiting.extend(sequences)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its blocks are free at once.

        A step in flight may still write into them. Steps run in order on the device, so whoever gets such a block
        next writes each of its slots later than that, and reads none before writing it.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> SchedulePlan:
        """Plan the next step and account for it as done.

        Running sequences come first, in arrival order; waiting ones follow while lanes, blocks and budget last.
        """
        decodes: list[ScheduledSequence] = []
        prefills: list[ScheduledSequence] = []
        preempted: list[Preemption] = []
        # Decodes have their token set aside, so that an older prompt's chunks never stop a running stream.
        wanted = [(sequence, self._wanted(sequence)) for sequence in self.running]
        budget = self.token_budget - sum(count == 1 for _, count in wanted)
        for sequence, count in wanted:
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for an older one just now
            share = count if count == 1 else min(count, budget)
            if share and self._make_room(sequence, share, preempted):
                budget -= share if count > 1 else 0
                self._take(sequence, share, decodes, prefills)
        while self.waiting and self._free_lanes and budget and not preempted:
            sequence = self.waiting[0]
            if not self._fits(sequence):
                break  # nobody overtakes the first in line
            count = min(self._wanted(sequence), budget)
            self._admit(sequence)
            self._grow(sequence, count)
            budget -= count
            self._take(sequence, count, decodes, prefills)
        return SchedulePlan(tuple(decodes), tuple(prefills), tuple(preempted))

    def _wanted(self, sequence: Sequence) -> int:
        """Tokens to compute; none once every output token it may have is known or being sampled."""
        if sequence.num_output >= sequence.max_tokens > 0:
            return 0
        if sequence.waits_for_token and sequence.num_pending:
            return 0
        return sequence.num_tokens - sequence.num_computed

    def _take(
        self,
        sequence: Sequence,
        count: int,
        decodes: list[ScheduledSequence],
        prefills: list[ScheduledSequence],
    ) -> None:
        samples = sequence.num_computed + count == sequence.num_tokens and sequence.max_tokens > 0
        share = ScheduledSequence(sequence, sequence.num_computed, count, samples)
        (decodes if count == 1 and samples else prefills).append(share)
        sequence.num_computed += count
        sequence.num_pending += samples

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        return max(0, self._blocks_for(num_tokens) - len(sequence.block_table))

    def _grow(self, sequence: Sequence, count: int) -> None:
        missing = self._missing(sequence, sequence.num_computed + count)
        sequence.block_table.extend(self.pool.allocate(missing))

    def _make_room(self, sequence: Sequence, count: int, preempted: list[Preemption]) -> bool:
        """Give the sequence blocks for ``count`` more tokens, at the expense of younger ones, or of itself."""
        missing = self._missing(sequence, sequence.num_computed + count)
        while missing > self.pool.num_free:
            victim = self.running[-1]
            preempted.append(Preemption(victim, victim.num_computed))
            self._preempt(victim)
            if victim is sequence:
                return False
        self._grow(sequence, count)
        return True

    def _fits(self, sequence: Sequence) -> bool:
        """Whether all its known tokens fit beside what running prompts still have coming, and a block each to grow.

        Asking for its first chunk only would admit sequences that the next steps have to throw out again.
        """
        promised = sum(1 + self._missing(s, s.num_tokens) for s in self.running)
        return self._missing(sequence, sequence.num_tokens) + promised <= self.pool.num_free

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.lane = self._free_lanes.pop()
        sequence.admission = self._num_admissions
        self._num_admissions += 1

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table.clear()
        self._free_lanes.append(sequence.lane)
        sequence.lane = -1
