"""An engine without a device: it drives scheduler and block tables a step ahead of the tokens, and checks both.

It keeps what a device would have in each slot, each lane and each slot of the swap space. What stands in a slot is
named by the cache group, the token and *all tokens before it*: a block that two equal beginnings share is right, and
one that is stale, evicted, overwritten, not copied or found by a wrong key shows up as a wrong name when it is read.
Tokens come from a tiny alphabet and depend on what is before them, so that equal beginnings are common. Every plan is
held against rules that are worked out here anew.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from random import Random

import pytest

from pagedjax.block_keys import BlockKey, next_key, root_key
from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.request import NO_BLOCK, Sequence, SequenceState
from pagedjax.scheduler import ScheduledSequence, SchedulePlan, Scheduler
from pagedjax.swap_space import SwapSpace

WAITING, RUNNING, FINISHED = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED
ALPHABET = 2


def extend(name: int, token: int) -> int:
    """The name of ``token`` behind everything that ``name`` names."""
    return hash((name, token))


def next_token(name: int, index: int) -> int:
    """What a model draws after ``name`` for a request's sample ``index``."""
    return hash((name, index)) // 8 % ALPHABET


class WatchedPool(BlockPool):
    """A pool that knows by itself which cached block has to be evicted next."""

    def __init__(self, num_blocks: int, num_groups: int = 1, *, keeps: bool = True):
        super().__init__(num_blocks, num_groups, keeps=keeps)
        self.released: OrderedDict[int, None] = OrderedDict()

    def allocate(self, count: int) -> list[int]:
        num_evicted = max(0, count - (self.num_free - self.num_cached))
        expected = list(self.released)[:num_evicted]
        blocks = super().allocate(count)
        assert [block for block in blocks if block in self.released] == expected, "not the one released first"
        for block in expected:
            del self.released[block]
        return blocks

    def share(self, block: int) -> None:
        super().share(block)
        self.released.pop(block, None)

    def free(self, blocks: Iterable[int]) -> None:
        depths = []
        for block in list(blocks):
            name = self.name(block)
            super().free([block])
            if self.keeps and name is not None and not self.ref_counts[block]:
                self.released[block] = None
                depths.append(name.depth)
        assert depths == sorted(depths, reverse=True), "a chain's head is released before its tail"

    def forget_all(self) -> None:
        super().forget_all()
        self.released.clear()


@dataclass(eq=False)
class Job:
    """A request: its unfinished sequences, and after how many tokens each finds its stop condition.

    A beam search has a ``width``, and ``chance`` decides how it goes on once each of its beams is ``ready``.
    """

    sequences: list[Sequence]
    stops_after: int
    root: int
    width: int = 0
    chance: Random = field(default_factory=Random)
    ready: set[Sequence] = field(default_factory=set)
    num_beams: int = 1


@dataclass
class LaneTable:
    """The packer's copy of the tables of a lane's sequence: what it has of them stays as long as the admission does."""

    admission: int = -1
    tables: list[list[int]] = field(default_factory=list)
    length: int = 0


class Device:
    """What each slot and each lane holds. Steps run in the order they were dispatched, at once here."""

    def __init__(self, engine: "SimulatedEngine"):
        self._engine, self._windows, self._size = engine, engine.windows, engine.block_size
        self.slots: list[tuple[int, int] | None] = [None] * (engine.num_blocks * engine.block_size)
        self.swapped: dict[int, list[tuple[int, int] | None]] = {}
        self.lanes: dict[int, int] = {}
        self._tables = [LaneTable() for _ in range(engine.max_num_seqs)]

    def run(self, plan: SchedulePlan) -> list[int | None]:
        """Move blocks, write the shares' tokens, look at every token they attend to, and sample."""
        for transfer in plan.transfers:
            if transfer.out:
                self.swapped[transfer.slot] = self.block(transfer.block)
            else:
                self._put(transfer.block, self.swapped[transfer.slot])
        for copy in plan.copies:
            self._put(copy.target, self.block(copy.source))
        rows = [(share, self._take_tables(share), self._names(share)) for share in plan]
        written = set[int]()
        for share, tables, names in rows:
            for position in range(max(share.start, share.first_write), share.start + share.num_tokens):
                for group, table in enumerate(tables):
                    slot = self._slot(table, position)
                    assert slot not in written, "two sequences write one slot"
                    written.add(slot)
                    self.slots[slot] = (group, names[position])
        sampled: list[int | None] = []
        for share, tables, names in rows:
            self._read(share, tables, names)
            token = next_token(names[share.start + share.num_tokens - 1], share.sequence.index)
            sampled.append(token if share.samples else None)
        for share, drawn in zip(plan, sampled, strict=True):
            if drawn is not None:
                self.lanes[share.sequence.lane] = drawn
        return sampled

    def block(self, block: int) -> list[tuple[int, int] | None]:
        """The names in a block's slots."""
        return self.slots[block * self._size : (block + 1) * self._size]

    def forget(self, blocks: Iterable[int]) -> None:
        """Nothing is in these blocks any more."""
        for block in blocks:
            self._put(block, [None] * self._size)

    def _put(self, block: int, content: list[tuple[int, int] | None]) -> None:
        self.slots[block * self._size : (block + 1) * self._size] = content

    def _slot(self, table: list[int], position: int) -> int:
        block = table[position // self._size]
        assert block != NO_BLOCK, "a block that has left the window is looked at"
        return block * self._size + position % self._size

    def _take_tables(self, share: ScheduledSequence) -> list[list[int]]:
        """A lane's tables, of which only what is new since the last step is looked at."""
        sequence = share.sequence
        kept, tables = self._tables[sequence.lane], sequence.block_tables
        if kept.admission != sequence.admission:
            kept.admission, kept.length, kept.tables = sequence.admission, 0, [[] for _ in tables]
        known = min(kept.length, share.start // self._size)
        for of_lane, table in zip(kept.tables, tables, strict=True):
            of_lane[known:] = table[known:]
        kept.length = len(tables[0])
        return kept.tables

    def _names(self, share: ScheduledSequence) -> list[int]:
        """Of all tokens up to the share's last, which the step before may have sampled."""
        sequence, names = share.sequence, self._engine.names[share.sequence]
        if share.start + share.num_tokens <= len(names):
            return names
        assert share.num_tokens == 1, "only a share of one token takes it from its lane"
        assert share.start == len(names), "a token that nobody has sampled yet"
        token = self.lanes[sequence.lane]
        assert token == next_token(names[-1], sequence.index), "another sequence's token"
        return [*names, extend(names[-1], token)]

    def _read(self, share: ScheduledSequence, tables: list[list[int]], names: list[int]) -> None:
        end = share.start + share.num_tokens
        for group, (window, table) in enumerate(zip(self._windows, tables, strict=True)):
            whole = window is None or (group == 0 and share.sequence.keeps_history)
            for position in range(0 if whole else max(0, share.start - (window or 0) + 1), end):
                found = self.slots[self._slot(table, position)]
                assert found == (group, names[position]), f"group {group} reads {found} at {position}"


@dataclass
class Before:
    """What the scheduler looked like before it planned."""

    running: list[Sequence]
    waiting: list[Sequence]  # those that can go on
    computed: dict[Sequence, int]
    wanted: dict[Sequence, int]
    reached: dict[Sequence, int]
    matches: dict[Sequence, int]
    num_evictions: int


class SimulatedEngine:
    """Plans a step ahead and commits later, as ``Engine.step`` does, and checks each plan."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        windows: tuple[int | None, ...] = (None,),
        keeps: bool = True,
        swap_slots: int = 0,
        by_priority: bool = False,
    ):
        self.num_blocks, self.block_size, self.windows = num_blocks, block_size, windows
        self.max_num_seqs, self.token_budget = max_num_seqs, token_budget
        self.pool = WatchedPool(num_blocks, len(windows), keeps=keeps)
        self.swap = SwapSpace(swap_slots) if swap_slots else None
        self.tables = BlockTables(self.pool, block_size=block_size, windows=windows, chunk=token_budget, swap=self.swap)
        self.scheduler = Scheduler(
            self.tables, max_num_seqs=max_num_seqs, token_budget=token_budget, by_priority=by_priority
        )
        self.in_flight: deque[tuple[SchedulePlan, list[int | None]]] = deque()
        self.jobs: list[Job] = []  # unfinished, in order of arrival
        self.job_of: dict[Sequence, Job] = {}  # of every unfinished sequence
        self.names: dict[Sequence, list[int]] = {}  # of its known tokens
        self.contents: dict[BlockKey, int] = {}  # a key's last token by name
        self.ended: deque[list[int]] = deque(maxlen=8)  # tokens of sequences that have ended, for a chat's next turn
        self.device = Device(self)
        self.num_preemptions = self.num_swaps = self.num_copies = self.queried = self.hits = self.again = 0
        self.num_found_later = 0  # prompts that went on from what others had computed since their last chunk
        self._num_jobs = 0
        self._admissions: set[int] = set()

    # ---- what the engine does ----

    def add(
        self,
        prompt: ListLike[int],
        max_tokens: int,
        *,
        n: int = 1,
        stops_after: int | None = None,
        waits: bool = False,
        salt: str | None = None,
        shares: bool = True,
        reads_cache: bool = True,
        keeps_history: bool = False,
        priority: int = 0,
    ) -> Job | None:
        """None where the request is refused, as it must be if it could never run to its end."""
        key = root_key(salt) if shares else None
        job = self._job(max_tokens if stops_after is None else stops_after, salt, shares)
        for index in range(n):
            sequence = self._sequence(job, index, prompt, len(prompt), max_tokens, key, priority)
            sequence.waits_for_token, sequence.keeps_history = waits, keeps_history
            sequence.reads_cache = reads_cache or index > 0
            job.sequences.append(sequence)
        return self._queue(job)

    def add_beams(
        self, prompt: ListLike[int], max_tokens: int, width: int, *, seed: int = 0, priority: int = 0
    ) -> Job | None:
        """A beam search; None where its beams could not all run at once."""
        own = (self.tables.blocks_for(max_tokens) + 1) * self.tables.num_groups
        most = self.tables.most
        blocks = min(most(len(prompt)) + width * own, width * most(len(prompt) + max_tokens))
        if width > self.max_num_seqs or blocks > self.num_blocks:
            return None
        job = self._job(max_tokens)
        job.width, job.chance = width, Random(seed)
        sequence = self._sequence(job, 0, prompt, len(prompt), max_tokens, root_key(), priority)
        sequence.waits_for_token = True
        job.sequences.append(sequence)
        return self._queue(job)

    def plan(self) -> SchedulePlan:
        """Plan the next step and dispatch it. The step before the last must have been committed."""
        assert len(self.in_flight) < 2, "the engine plans one step ahead"
        before = self._before()
        plan = self.scheduler.schedule()
        self._check_plan(plan, before)
        tokens = self.device.run(plan)
        if plan.num_tokens:
            self.in_flight.append((plan, tokens))
        self._count(plan)
        return plan

    def commit(self, failing: Job | None = None) -> None:
        """Bring the oldest step's tokens in; ``failing`` is a request whose token raises."""
        plan, tokens = self.in_flight.popleft()
        touched: dict[Job, None] = {}
        for share, token in zip(plan, tokens, strict=True):
            sequence = share.sequence
            if share.samples:
                sequence.num_pending -= 1
            if sequence.state is FINISHED:
                continue
            job = self.job_of[sequence]
            touched[job] = None
            if job is failing:
                self.end(job)
            else:
                self._take(job, share, token)
        for job in touched:
            if job.width and job.ready and job.ready == set(job.sequences):
                self._advance(job)

    def end(self, job: Job) -> None:
        """Abort a request, or end it with an error."""
        for sequence in list(job.sequences):
            self._finish(job, sequence)

    def step(self) -> None:
        """One turn of the engine's loop."""
        behind = len(self.in_flight)
        self.plan()
        if behind:
            self.commit()

    def drain(self) -> int:
        """Step until all is done; the steps that took. Fails where that takes longer than it ever may."""
        # The first in turn is never preempted again, and moves on at the latest every second step. A search's beams
        # may have to take turns, and compute all that they have anew at every token.
        bound = 10
        for job in self.jobs:
            for s in job.sequences:
                length = s.num_prompt + s.max_tokens
                bound += 3 * length * (s.max_tokens * job.width if job.width else 1)
        for steps in range(bound):
            if not self.jobs and not self.in_flight:
                return steps
            self.step()
            self.check()
        pytest.fail(f"still {len(self.jobs)} requests after {bound} steps")

    def evict(self, count: int) -> None:
        """Somebody takes blocks that nobody holds, and gives them back."""
        blocks = self.pool.allocate(min(count, self.pool.num_free))
        self.device.forget(blocks)
        self.pool.free(blocks)

    def fail_all(self) -> None:
        """The device fails, and with it everybody; nothing is in its memory any more."""
        self.in_flight.clear()
        for job in list(self.jobs):
            self.end(job)
        self.pool.forget_all()
        assert self.pool.num_cached == 0
        self.device = Device(self)

    def _job(self, stops_after: int, salt: str | None = None, shares: bool = True) -> Job:
        self._num_jobs += 1
        # Whose tokens mean the same: everybody's of one salt, or only those of the request's own sequences.
        root = (1, int.from_bytes((salt or "").encode())) if shares else (0, self._num_jobs)
        return Job([], stops_after, hash(root))

    def _sequence(
        self,
        job: Job,
        index: int,
        tokens: ListLike[int],
        num_prompt: int,
        max_tokens: int,
        key: BlockKey | None,
        priority: int,
    ) -> Sequence:
        sequence = Sequence(
            request_id=str(self._num_jobs),
            index=index,
            token_ids=[],
            num_prompt=num_prompt,
            max_tokens=max_tokens,
            priority=priority,
            root_key=key,
        )
        self.names[sequence] = []
        self.job_of[sequence] = job
        for token in tokens:
            self._append(sequence, token)
        return sequence

    def _queue(self, job: Job) -> Job | None:
        first = job.sequences[0]
        least, most = self._blocks_at_end(first)
        try:
            self.scheduler.add(*job.sequences)
        except ValueError as error:
            if f"and there are {self.num_blocks}" not in str(error):
                raise
            assert most > self.num_blocks, "refused, and would have fitted"
            for sequence in job.sequences:
                del self.job_of[sequence], self.names[sequence]
            return None
        assert least <= self.num_blocks, "taken, and can never fit"
        self.jobs.append(job)
        return job

    def _blocks_at_end(self, sequence: Sequence) -> tuple[int, int]:
        """How many blocks a sequence holds at the most: at least so many, and never more."""
        whole = self._blocks(sequence.num_prompt + sequence.max_tokens)
        least = most = 0
        for group, window in enumerate(self.windows):
            if window is None or (group == 0 and sequence.keeps_history):
                least, most = least + whole, most + whole
            else:
                least, most = least + min(whole, self._blocks(window)), most + min(whole, self._window_blocks(window))
        return least, most

    def _append(self, sequence: Sequence, token: int) -> None:
        names = self.names[sequence]
        names.append(extend(names[-1] if names else self.job_of[sequence].root, token))
        sequence.token_ids.append(token)
        if sequence.root_key is not None and len(names) % self.block_size == 0:
            self.contents[self._keys(sequence)[-1]] = names[-1]

    def _keys(self, sequence: Sequence) -> list[bytes]:
        keys, key = [], sequence.root_key
        assert isinstance(key, bytes)
        for end in range(self.block_size, len(sequence.token_ids) + 1, self.block_size):
            key = next_key(key, sequence.token_ids[end - self.block_size : end])
            keys.append(key)
        return keys

    def _take(self, job: Job, share: ScheduledSequence, token: int | None) -> None:
        sequence, end = share.sequence, share.start + share.num_tokens
        if end >= sequence.num_prompt:
            sequence.reads_cache = True  # the prompt's log-probabilities are all there
        if job.width:
            if token is not None:
                job.ready.add(sequence)
                sequence.is_paused = True
        elif token is not None:
            assert token == next_token(self.names[sequence][-1], sequence.index), "a token for another place"
            self._append(sequence, token)
            if sequence.num_known_output >= min(job.stops_after, sequence.max_tokens):
                self._finish(job, sequence)
        elif sequence.max_tokens == 0 and end >= sequence.num_prompt:
            self._finish(job, sequence)

    def _advance(self, job: Job) -> None:
        """Each beam has given its candidates: some go on, some fork, some are dropped."""
        beams, chance = list(job.sequences), job.chance
        job.ready.clear()
        if beams[0].num_known_output + 1 >= beams[0].max_tokens or chance.random() < 0.05:
            self.end(job)
            return
        forks, kept = [], dict[Sequence, int]()
        for _ in range(job.width):
            parent, token = chance.choice(beams), chance.randrange(ALPHABET)
            if parent in kept:
                tokens = [*parent.token_ids, token]
                child = self._sequence(
                    job, job.num_beams, tokens, parent.num_prompt, parent.max_tokens, parent.root_key, parent.priority
                )
                child.request_id, child.root_key, child.waits_for_token = parent.request_id, None, True
                job.num_beams += 1
                forks.append((parent, child))
            else:
                kept[parent] = token
        for parent, token in kept.items():  # only now: a parent's children begin with the tokens it had
            self._append(parent, token)
            parent.is_paused = False
        for beam in beams:
            if beam not in kept:
                self._finish(job, beam)
        for parent, child in forks:
            self.scheduler.fork(parent, child)
            job.sequences.append(child)

    def _finish(self, job: Job, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        assert sequence.state is FINISHED
        assert not any(sequence.block_tables)
        assert sequence.lane == -1
        assert not sequence.swapped
        self.ended.append(list(sequence.token_ids))
        job.sequences.remove(sequence)
        job.ready.discard(sequence)
        del self.job_of[sequence], self.names[sequence]
        if not job.sequences:
            self.jobs.remove(job)

    def _count(self, plan: SchedulePlan) -> None:
        self.num_preemptions += len(plan.preemptions)
        self.num_swaps += sum(not transfer.out for transfer in plan.transfers)
        self.num_copies += len(plan.copies)
        self.again += sum(share.num_again for share in plan)
        assert plan.queried >= 0
        assert plan.hits >= 0
        self.queried += plan.queried
        self.hits += plan.hits
        assert self.hits <= self.queried, "more found than looked for"

    # ---- what has to hold ----

    def check(self) -> None:
        """Between any two calls."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        forks = [child for s in (*running, *waiting) for child in s.forks]
        assert {*running, *waiting, *forks} == set(self.job_of)
        assert len(running) + len(waiting) + len(forks) == len(self.job_of), "somebody is in two places"
        for queue in (running, waiting):
            assert [s.order for s in queue] == sorted(s.order for s in queue)
        self._check_pool()
        self._check_swap()
        lanes = [s.lane for s in running]
        assert len(set(lanes)) == len(lanes) == self.max_num_seqs - self.scheduler.num_free_lanes
        assert set(lanes) <= set(range(self.max_num_seqs))
        for sequence in running:
            assert sequence.state is RUNNING
            self._check_tables(sequence)
        for sequence in (*waiting, *forks):
            assert sequence.state is WAITING
            assert sequence.block_tables == [[] for _ in self.windows], "who waits holds nothing"
            assert (sequence.lane, sequence.num_computed, sequence.num_stored) == (-1, 0, 0)
        pending = dict.fromkeys(self.job_of, 0)
        for plan, _ in self.in_flight:
            for share in plan:
                if share.sequence in pending:
                    pending[share.sequence] += share.samples
        assert {s: s.num_pending for s in self.job_of} == pending

    def check_idle(self) -> None:
        """When nobody is left."""
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.num_free == self.num_blocks, "blocks are held at the end"
        assert self.scheduler.num_free_lanes == self.max_num_seqs
        if self.swap is not None:
            assert self.swap.num_used == 0
            for number in range(self.swap.num_slots):
                assert self.swap.take(0, number) is not None, "a slot is lost"
            for number in range(self.swap.num_slots):
                self.swap.drop(0, number)

    def _check_tables(self, sequence: Sequence) -> None:
        assert sequence.num_computed <= sequence.num_tokens
        assert sequence.num_computed <= sequence.num_stored
        assert sequence.num_registered * self.block_size <= min(sequence.num_stored, len(sequence.token_ids))
        for group, (window, table) in enumerate(zip(self.windows, sequence.block_tables, strict=True)):
            # On demand: never a block before there is a token for it.
            assert len(table) == self._blocks(sequence.num_stored)
            held = [block for block in table if block != NO_BLOCK]
            slid = len(table) - len(held)
            assert table[:slid] == [NO_BLOCK] * slid, "a hole in a table"
            assert sequence.num_slid[group] == slid
            if window is None or (group == 0 and sequence.keeps_history):
                assert slid == 0
            else:
                assert len(held) <= self._window_blocks(window), "blocks that have left the window are held"

    def _check_pool(self) -> None:
        pool = self.pool
        tables = [table for s in self.job_of for table in s.block_tables]
        pool.check_integrity([block for block in table if block != NO_BLOCK] for table in tables)
        states = [pool.state(block) for block in range(self.num_blocks)]
        counts = {state: states.count(state) for state in ("free", "cached", "referenced")}
        assert (pool.num_cached, pool.num_held) == (counts["cached"], counts["referenced"])
        assert pool.num_free == counts["free"] + counts["cached"]
        assert pool.keeps or not pool.num_cached, "a block is kept that should not be"
        assert [b for b in range(self.num_blocks) if states[b] == "cached"] == sorted(pool.released)
        for block in range(self.num_blocks):
            name = pool.name(block)
            if name is not None:
                content = self.device.block(block)[-1]
                assert content == (name.group, self.contents[name.key]), "a block holds other tokens than its name says"

    def _check_swap(self) -> None:
        for sequence in self.job_of:
            assert not sequence.swapped or sequence.state is WAITING, "who runs has something in the swap space"
        if self.swap is None:
            return
        names = {name for s in self.job_of for name in s.swapped}
        assert self.swap.num_used == len(names) <= self.swap.num_slots, "a slot without an owner"
        slots = []
        for group, key in names:
            slot = self.swap.lookup(group, key)
            assert slot is not None, "an owner without a slot"
            slots.append(slot)
            assert self.device.swapped[slot][-1] == (group, self.contents[key])
        assert len(set(slots)) == len(slots)

    def _before(self) -> Before:
        running = list(self.scheduler.running)
        wanted = {}
        for sequence in running:
            left = sequence.num_tokens - sequence.num_computed
            done = 0 < sequence.max_tokens <= sequence.num_output or sequence.is_paused
            wanted[sequence] = 0 if done or (sequence.waits_for_token and sequence.num_pending) else left
        waiting = [s for s in self.scheduler.waiting if not s.is_paused]
        return Before(
            running,
            waiting,
            {s: s.num_computed for s in self.job_of},
            wanted,
            {s: s.num_reached for s in self.job_of},
            {s: self._longest_match(s) for s in waiting},
            self.pool.num_evictions,
        )

    def _longest_match(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed, given what is in the pool now."""
        if sequence.root_key is None or not sequence.reads_cache:
            return 0
        keys, last = self._keys(sequence), len(sequence.token_ids) - 1
        for count in range(len(keys), 0, -1):
            start = min(count * self.block_size, last)
            oldest = start // self.block_size * self.block_size
            for group, window in enumerate(self.windows):
                whole = window is None or (group == 0 and sequence.keeps_history)
                first = 0 if whole else max(0, oldest - (window or 0) + 1) // self.block_size
                if any(self.pool.lookup(group, key) is None for key in keys[first:count]):
                    break
            else:
                return start
        return 0

    def _check_plan(self, plan: SchedulePlan, before: Before) -> None:
        assert plan.num_tokens == sum(share.num_tokens for share in plan) <= self.token_budget, "over the budget"
        shares = {share.sequence: share for share in plan}
        assert len(shares) == len(list(plan)) <= self.max_num_seqs
        stayed = {*before.running} - {preemption.sequence for preemption in plan.preemptions}
        for sequence, share in shares.items():
            assert sequence.state is RUNNING, "a plan holds running sequences only"
            self._check_share(sequence, share, before, sequence in stayed)
        assert all(share.num_tokens == 1 and share.samples for share in plan.decodes)
        assert not any(share.num_tokens == 1 and share.samples for share in plan.prefills)
        for part in (plan.decodes, plan.prefills):
            turns = [(share.sequence not in stayed, share.sequence.order) for share in part]
            assert turns == sorted(turns), "first those that ran, then those admitted, each in turn"
        self._check_preemptions(plan, before)
        self._check_progress(plan, before, shares)

    def _check_share(self, sequence: Sequence, share: ScheduledSequence, before: Before, stayed: bool) -> None:
        assert share.num_tokens >= 1
        start, end, was = share.start, share.start + share.num_tokens, before.computed[sequence]
        assert end <= len(sequence.token_ids) or stayed, "a token that is being sampled, and its lane is lost"
        if stayed:
            assert start >= was
            self.num_found_later += start > was
        if start > was:  # somebody else has computed the first of them
            assert sequence.root_key is not None
            assert sequence.reads_cache
            assert start % self.block_size == 0 or start == len(sequence.token_ids) - 1
        assert end == sequence.num_computed
        assert share.first_write >= start
        assert sequence.num_stored == max(end, share.first_write)
        known = sequence.num_tokens - share.samples
        assert end <= known, "a token is computed that is not known yet"
        assert share.samples == (end == known and sequence.max_tokens > 0)
        if sequence.max_tokens:
            assert sequence.num_output <= sequence.max_tokens, "a token too many is sampled"
        assert not (sequence.waits_for_token and known > len(sequence.token_ids))
        assert not sequence.is_paused
        assert share.num_again == max(0, min(end, before.reached[sequence]) - start)
        assert sequence.num_reached == max(end, before.reached[sequence])
        assert 0 <= sequence.num_cached <= sequence.num_prompt

    def _check_preemptions(self, plan: SchedulePlan, before: Before) -> None:
        victims = {preemption.sequence: preemption for preemption in plan.preemptions}
        assert len(victims) == len(plan.preemptions), "preempted twice in one plan"
        for sequence, preemption in victims.items():
            assert sequence in before.running
            assert 0 <= preemption.num_lost <= before.computed[sequence]
            assert preemption.mode in ("swap", "recompute")
            ahead = [s for s in (*before.running, *before.waiting) if s.order < sequence.order]
            assert ahead or sequence.is_paused, "the first in turn is preempted"
            if sequence in self.scheduler.waiting:
                assert (preemption.mode == "swap") == bool(sequence.swapped)

    def _check_progress(self, plan: SchedulePlan, before: Before, shares: dict[Sequence, ScheduledSequence]) -> None:
        victims = {preemption.sequence for preemption in plan.preemptions}
        for sequence in before.running:
            given = shares[sequence].num_tokens if sequence in shares else 0
            if sequence in victims:
                assert sequence in self.scheduler.waiting or sequence in shares
            elif before.wanted[sequence] == 1:
                assert given == 1, "a decode lost its turn"
            elif before.wanted[sequence] > 1 and not victims:
                left = sequence.num_tokens - shares[sequence].samples - sequence.num_computed if given else 1
                assert not left or plan.num_tokens == self.token_budget, "a prompt could have gone on"
        admitted = [s for s in before.waiting if s.state is RUNNING]
        left_behind = [s for s in before.waiting if s.state is WAITING]
        assert all(s in shares for s in admitted)
        for sequence in admitted:
            assert sequence.admission not in self._admissions
            self._admissions.add(sequence.admission)
            assert all(sequence.order < other.order for other in left_behind), "the first in line was overtaken"
            if self.pool.keeps and self.pool.num_evictions == before.num_evictions:
                assert shares[sequence].start >= before.matches[sequence], "computed, and was there"
        if left_behind and not victims and self.scheduler.num_free_lanes and plan.num_tokens < self.token_budget:
            groups = len(self.windows)
            promised = sum(
                groups * (1 + self._blocks(s.num_tokens) - len(s.block_tables[0])) for s in self.scheduler.running
            )
            needed = groups * self._blocks(left_behind[0].num_tokens)
            assert needed + promised > self.pool.num_free, "the first in line had room"

    def _blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size

    def _window_blocks(self, window: int) -> int:
        """A chunk may begin at a block's last slot, and what that block's first token sees is kept."""
        return self._blocks(self.block_size - 1 + self.token_budget) + self._blocks(window - 1)
