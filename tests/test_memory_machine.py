"""Pool, tables and scheduler under any order of events, against a device that knows what stands in every slot.

`SimulatedEngine` plans a step ahead, executes each plan slot by slot, and checks it. After every rule: a block is free,
cached or referenced, exactly one of them; reference counts equal the tables; nobody writes a slot that another writes;
what a row reads is the tokens before it, whoever computed them; a name leads to what it says; who waits holds nothing;
lanes, token budget, turns, windows and swap slots are as they should be; the first in turn is never preempted while
another runs. Drained, every request has ended and nothing is held.

Each of these mutations of the code under test was made once, by hand, and is caught by the machine:

- pool: a shared block not counted; a count dropped for all; freed at the first release; cached and taken; the youngest
  evicted; evicted before free ones are used; an evicted block keeps its name; kept where nothing is to be kept; a name
  taken over; groups with one set of names; names kept after a fault of the device;
- keys: without the parent; without the last token;
- register: a token that is not known; one that is not computed; the next block's key;
- match: for who may not read; blocks that are not full; nothing left to compute; the last block never; windows ignored,
  or a token short; the history of penalties ignored;
- adopt: what is there written again; swapped blocks not fetched; swap slots kept; no reference taken;
- grow: no copy on write; a copy not ordered, the other way round, in one group only, or for the last holder too; the
  source not released; copies that `missing` does not count, or counts for one group;
- slide: a block too many; never; head after tail; its count left;
- fork: no references; one table for both; counts or keys shared; the last token written again; into a lane that is not
  free; before the prompt is whole; forgotten; lost with their leader;
- release and finish: head first; blocks kept; swap slots kept;
- swap: a slot per sequence; the holder forgotten; dropped at the first release; references not counted; transfers lost,
  out or in;
- window_blocks: one too few;
- admission: promises ignored; matches not counted; the first in line overtaken; paused ones run; budget not reduced;
- a running prompt that finds more: over the budget; in the middle of a block; swapped in (`test_scheduler`);
- turns: decodes not set aside; preempted ones planned; a token past `max_tokens`; a token waited for; those ahead taken
  as victims; priorities that make way for ever, or for equals; a stand-off of beams never broken, or by whoever runs;
- preempt: the lane kept; the blocks kept; last in line;
- counts: tokens computed again, and hits, counted wrongly; admission numbers used twice.
"""

from random import Random
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
from simulated_engine import ALPHABET, SimulatedEngine

_CHANCE = Random(3)
# Prompts begin with one of these, so that equal beginnings of every length are common.
DOCUMENTS = tuple(tuple(_CHANCE.randrange(ALPHABET) for _ in range(32)) for _ in range(2))

LENGTHS = st.one_of(st.integers(0, 8), st.integers(0, 8), st.integers(9, 32))
MORE = st.lists(st.integers(0, ALPHABET - 1), max_size=3)
REQUESTS = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.integers(0, 4), st.integers(1, 16)),
        "n": st.sampled_from([1, 1, 1, 2, 3, 4]),
        "waits": st.sampled_from([False, False, True]),
        "stops_after": st.sampled_from([None, None, 1, 2, 3, 7]),
        "salt": st.sampled_from([None, None, None, "salt"]),
        "shares": st.sampled_from([True, True, True, True, False]),
        "reads_cache": st.sampled_from([True, True, True, False]),
        "keeps_history": st.sampled_from([False, False, True]),
        "priority": st.integers(-1, 1),
    }
)


class MemoryMachine(RuleBasedStateMachine):
    """Requests of all kinds, in any order of arrival, steps, stops, aborts and failures."""

    engine: SimulatedEngine
    executions = 0
    seen: dict[str, int]
    is_sound = False  # where a rule has failed, the rest would only hide it

    @initialize(
        windows=st.sampled_from([(None,), (None,), (4,), (1,), (None, 5), (None, 3, 3), (2, 6)]),
        num_blocks=st.one_of(st.integers(2, 8), st.integers(2, 8), st.integers(2, 30)),
        block_size=st.sampled_from([1, 2, 2, 3, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        more_budget=st.integers(0, 8),
        keeps=st.sampled_from([True, True, True, False]),
        swap_slots=st.sampled_from([0, 0, 1, 3, 12, 40]),
        by_priority=st.booleans(),
    )
    def start(
        self, windows: tuple[int | None, ...], num_blocks: int, max_num_seqs: int, more_budget: int, **sizes: Any
    ) -> None:
        self.engine = SimulatedEngine(
            windows=windows,
            num_blocks=num_blocks * len(windows),
            max_num_seqs=max_num_seqs,
            token_budget=max_num_seqs + more_budget,
            **sizes,
        )
        self.may_plan = True

    @rule(document=st.integers(0, 1), length=LENGTHS, more=MORE, requests=st.lists(REQUESTS, min_size=1, max_size=3))
    def add(self, document: int, length: int, more: list[int], requests: list[dict[str, Any]]) -> None:
        self._executed()
        for request in requests:
            self._add([*DOCUMENTS[document][:length], *more], request)

    @precondition(lambda self: self.engine.ended)
    @rule(which=st.integers(0, 7), cut=st.sampled_from([0, 0, 1, 2]), more=MORE, request=REQUESTS)
    def add_a_chat_s_next_turn(self, which: int, cut: int, more: list[int], request: dict[str, Any]) -> None:
        self._executed()
        before = self.engine.ended[which % len(self.engine.ended)]
        self._add([*before[: len(before) - cut], *more], request)

    @rule(
        document=st.integers(0, 1),
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 8),
        width=st.integers(1, 4),
        seed=st.integers(0, 9),
        priority=st.integers(-1, 1),
    )
    def add_beams(self, document: int, length: int, **request: Any) -> None:
        self._executed()
        self.engine.add_beams(DOCUMENTS[document][:length], **request)

    @rule(document=st.integers(0, 1), count=st.integers(3, 6))
    def add_alike(self, document: int, count: int) -> None:
        """They preempt each other, and who catches up finds what the others have decoded meanwhile."""
        self._executed()
        for _ in range(count):
            self.engine.add(DOCUMENTS[document][:1], 18)

    @rule()
    def add_what_just_fits(self) -> None:
        self._executed()
        engine = self.engine
        self.engine.add([1], engine.num_blocks // len(engine.windows) * engine.block_size - 1)

    @precondition(lambda self: len(self.engine.in_flight) < 2 and self.may_plan)
    @rule()
    def plan(self) -> None:
        self._executed()
        # With nothing to dispatch the engine waits for the step in flight before it plans again.
        self.may_plan = bool(self.engine.plan().num_tokens) or not self.engine.in_flight

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def commit(self) -> None:
        self._executed()
        self.engine.commit()
        self.may_plan = True

    @rule(times=st.integers(1, 12))
    def steps(self, times: int) -> None:
        self._executed()
        self._catch_up()
        for _ in range(times):
            self.engine.step()
            self.engine.check()

    @precondition(lambda self: self.engine.jobs)
    @rule(which=st.integers(0, 30), how=st.sampled_from(["fault", "abort", "abort the first in line"]))
    def end(self, which: int, how: str) -> None:
        self._executed()
        engine = self.engine
        job = engine.jobs[which % len(engine.jobs)]
        if how == "fault" and engine.in_flight:
            engine.commit(failing=job)
            self.may_plan = True
        elif how == "abort the first in line" and engine.scheduler.waiting:
            engine.end(engine.job_of[engine.scheduler.waiting[0]])
        else:
            engine.end(job)

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        self._executed()
        self.engine.evict(count)

    @precondition(lambda self: self.engine.jobs)
    @rule(really=st.sampled_from([False, False, True]))
    def fail_or_drain(self, really: bool) -> None:
        self._executed()
        self._catch_up()
        if really:
            self.engine.fail_all()
        else:
            self.engine.drain()
            self.engine.check_idle()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()
            self.is_sound = True

    def teardown(self) -> None:
        if self.is_sound:
            self._catch_up()
            self.engine.drain()
            self.engine.check_idle()
            for name in self.seen:
                self.seen[name] += getattr(self.engine, name)

    def _add(self, prompt: list[int], request: dict[str, Any]) -> None:
        self.engine.add(prompt or [0], **request)

    def _executed(self) -> None:
        type(self).executions += 1
        self.is_sound = False

    def _catch_up(self) -> None:
        """As the engine is between two of its steps: at most one step is in flight."""
        while self.engine.in_flight and (len(self.engine.in_flight) == 2 or not self.may_plan):
            self.engine.commit()
            self.may_plan = True


def run_machine(examples: int, steps: int, derandomize: bool) -> dict[str, int]:
    """Run it, and return how many rules were executed and how often what happened."""

    class Counted(MemoryMachine):
        executions = 0
        seen = dict.fromkeys(("num_preemptions", "num_swaps", "num_copies", "num_found_later", "hits", "again"), 0)

    run_state_machine_as_test(
        Counted,
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
    return {"executions": Counted.executions, **Counted.seen}


def test_any_order_of_events() -> None:
    seen = run_machine(examples=600, steps=50, derandomize=True)
    assert seen["executions"] >= 20_000
    assert min(seen.values()) > 0, seen


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(6))  # each well within the time that a single test may take
def test_any_order_of_events_for_long(part: int) -> None:
    assert run_machine(examples=500, steps=100, derandomize=False)["executions"] > 200_000 / 6
