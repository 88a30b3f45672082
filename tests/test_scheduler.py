"""Scheduler and block pool, driven as the engine drives them, one step ahead of the tokens.

`SimulatedEngine` stands in for engine and device and checks every plan. A Hypothesis state machine moves it:
requests come, steps are planned and committed, requests are aborted, fail and stop at any moment.

Broken on purpose, one at a time, each of these is caught here, all by the state machine alone but for
preempting for tokens of later steps:

* the pool: a freed block not given back, the count not dropped, a block handed out but left on the free list;
* finish: blocks or lane not freed, blocks freed twice, table or lane kept, the sequence left in running or in
  waiting, its state left as it was;
* preempt: blocks not freed, num_computed or state kept, last in line, in no line, the oldest or the second
  youngest chosen, one too many chosen, going on after having preempted itself, the tokens lost counted
  wrongly, a preempted one still planned;
* blocks needed: one too few, one too many, rounded down, those of the share's length from zero;
* budget: one too much, one too little, decodes not set aside or subtracted twice, prefills or admitted ones
  not subtracted, shares of either that ignore it;
* admission: the first in line overtaken, the wrong end, lanes or pool ignored, a lane too few, too many or
  shared, room for the first chunk only, no room left for the running ones' prompts or growth, one block too
  careful, admission numbers used twice, the order of the running ones;
* shares: start or count off by one, samples never, always or with max_tokens 0, in the wrong list, tokens
  planned past max_tokens, the token waited for planned regardless, num_pending forgotten;
* add: what can never run is taken, what just fits is refused, max_tokens left out of the sum.

Two changes make no difference that could be seen: admitting in a step that preempts (whoever is first in line
then never fits) and, while blocks have one owner each, dropping the test that a count has reached zero.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_engine import SimulatedEngine

from pagedjax.blocks import BlockPool
from pagedjax.request import Sequence
from pagedjax.scheduler import SchedulePlan, Scheduler

REQUESTS = st.fixed_dictionaries(
    {
        "num_prompt": st.one_of(st.integers(1, 8), st.integers(1, 8), st.integers(9, 24)),
        "max_tokens": st.integers(0, 16),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "waits": st.sampled_from([False, False, True]),
        "stops_after": st.sampled_from([None, None, 1, 2, 3, 7]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Requests of all kinds, in any order of arrival, steps, stops, aborts and failures."""

    engine: SimulatedEngine

    @initialize(
        num_blocks=st.integers(1, 14),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        more_budget=st.integers(0, 8),
    )
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, more_budget: int) -> None:
        self.engine = SimulatedEngine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            token_budget=max_num_seqs + more_budget,
        )
        self.may_plan = True

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.engine.add(**request)

    @rule()
    def add_what_just_fits(self) -> None:
        self.engine.add(1, self.engine.num_blocks * self.engine.block_size - 1)

    @precondition(lambda self: len(self.engine.in_flight) < 2 and self.may_plan)
    @rule()
    def plan(self) -> None:
        # With nothing to dispatch the engine waits for the step in flight before it plans again.
        self.may_plan = bool(self.engine.plan().num_tokens) or not self.engine.in_flight

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self) -> None:
        self.engine.commit()
        self.may_plan = True

    @precondition(lambda self: self.may_plan)
    @rule(times=st.integers(1, 12))
    def steps(self, times: int) -> None:
        if len(self.engine.in_flight) == 2:
            self.engine.commit()
        for _ in range(times):
            self.engine.step()
            self.engine.check()

    @precondition(lambda self: self.engine.jobs)
    @rule(which=st.integers(0, 30), how=st.sampled_from(["fault", "abort", "abort the first in line"]))
    def end(self, which: int, how: str) -> None:
        engine = self.engine
        job = engine.jobs[which % len(engine.jobs)]
        if how == "fault" and engine.in_flight:
            engine.commit(failing=job)
            self.may_plan = True
        elif how == "abort the first in line" and engine.scheduler.waiting:
            first = engine.scheduler.waiting[0]
            engine.end(next(job for job in engine.jobs if first in job.sequences))
        else:
            engine.end(job)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.in_flight and (len(self.engine.in_flight) == 2 or not self.may_plan):
            self.engine.commit()
            self.may_plan = True
        self.engine.drain()
        assert self.engine.pool.num_free == self.engine.num_blocks
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting


def run_machine(examples: int, steps: int, derandomize: bool) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=derandomize,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_events() -> None:
    run_machine(examples=400, steps=50, derandomize=True)


@pytest.mark.nightly
def test_any_order_of_events_for_long() -> None:
    run_machine(examples=6000, steps=120, derandomize=False)


# ---- what a reader should know, one at a time ------------------------------------------------------------


def shares(plan: SchedulePlan) -> dict[str, int]:
    return {share.sequence.request_id: share.num_tokens for share in plan}


def test_prompts_go_in_chunks_and_decodes_keep_their_pace() -> None:
    engine = SimulatedEngine(num_blocks=40, block_size=4, max_num_seqs=3, token_budget=8)
    engine.add(3, 30)
    assert shares(engine.plan()) == {"0": 3}
    engine.add(20, 5)
    engine.add(2, 5)
    assert shares(engine.plan()) == {"0": 1, "1": 7}
    engine.commit()
    assert shares(engine.plan()) == {"0": 1, "1": 7}
    engine.commit()
    plan = engine.plan()
    assert shares(plan) == {"0": 1, "1": 6, "2": 1}
    assert [share.samples for share in plan] == [True, True, False]
    assert [len(part) for part in (plan.decodes, plan.prefills)] == [1, 2]
    engine.drain()


def test_a_pool_for_one_serves_any_number() -> None:
    engine = SimulatedEngine(num_blocks=4, block_size=4, max_num_seqs=8, token_budget=8)
    for number in range(200):
        engine.add(1 + number % 8, 16 - 1 - number % 8)
    engine.drain()
    assert engine.pool.num_free == 4
    assert engine.num_preemptions > 0


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    engine = SimulatedEngine(num_blocks=5, block_size=2, max_num_seqs=3, token_budget=6)
    for _ in range(3):
        engine.add(2, 6)
    plans: list[SchedulePlan] = []
    while not any(plan.preemptions for plan in plans):
        plans.append(engine.plan())
        if len(engine.in_flight) == 2:
            engine.commit()
    victim = plans[-1].preemptions[0].sequence
    assert victim.request_id == "1"
    assert [s.request_id for s in engine.scheduler.running] == ["0"]
    assert [s.request_id for s in engine.scheduler.waiting] == ["1", "2"]
    engine.drain()


def test_sequences_are_queued_all_or_none() -> None:
    scheduler = Scheduler(BlockPool(2), block_size=4, max_num_seqs=1, token_budget=4)
    fits, too_long = Sequence("a", 0, [1, 2], 2, 6), Sequence("a", 1, [1, 2], 2, 7)
    with pytest.raises(ValueError, match="3 blocks wanted, the pool has 2"):
        scheduler.add(fits, too_long)
    assert not scheduler.waiting
    scheduler.add(fits)
    assert list(scheduler.waiting) == [fits]


def test_every_running_sequence_needs_a_token_of_the_budget() -> None:
    with pytest.raises(ValueError, match="token_budget 3 is below max_num_seqs 4"):
        Scheduler(BlockPool(1), block_size=1, max_num_seqs=4, token_budget=3)


def test_finishing_twice_does_no_harm() -> None:
    engine = SimulatedEngine(num_blocks=4, block_size=1, max_num_seqs=2, token_budget=2)
    job = engine.add(1, 2)
    assert job is not None
    (sequence,) = job.sequences
    engine.plan()
    engine.scheduler.finish(sequence)
    engine.scheduler.finish(sequence)
    assert engine.pool.num_free == 4
    assert engine.scheduler.schedule().num_tokens == 0


def test_nobody_gives_way_to_tokens_of_later_steps() -> None:
    """A prompt goes on while the next chunk has room, though its rest has none until the other one ends."""
    engine = SimulatedEngine(num_blocks=12, block_size=1, max_num_seqs=2, token_budget=2)
    engine.add(1, 5)
    engine.add(9, 1)
    least = 12
    while engine.jobs or engine.in_flight:
        engine.step()
        engine.check()
        for sequence in engine.scheduler.running:
            least = min(least, engine.pool.num_free - (sequence.num_prompt - sequence.num_computed))
    assert least < 0, "its rest had no room for a while"
    assert engine.num_preemptions == 0
