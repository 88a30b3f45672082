"""What goes wrong for one request stays with it, and leaves nothing behind."""

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import pytest
from chain_model import ChainModel
from small_engine import FLAGS, assert_empty, greedy, run, write_small_model

from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.engine import Engine
from pagedjax.generation import Generation, RunningRequest
from pagedjax.request import SequenceState
from pagedjax.text import TextStream


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> ChainModel:
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def sound() -> list[LLM]:
    """The engine that came well out of the test before, if it did."""
    return []


@pytest.fixture
def llm(sound: list[LLM], chain: ChainModel) -> Iterator[LLM]:
    """After each test nothing may be left, and the engine has to serve."""
    llm = sound.pop() if sound else LLM(str(chain.folder), **FLAGS)
    yield llm
    assert_empty(llm.engine)
    (out,) = llm.generate("<go>", greedy(), use_tqdm=False)
    assert out.outputs[0].token_ids == chain.follow("<go>")
    run(llm.engine)
    sound.append(llm)


@pytest.fixture
def engine(llm: LLM) -> Engine:
    return llm.engine


NEIGHBOURS: list[tuple[str, dict[str, Any]]] = [
    ("<go>", {"logprobs": 1}),
    ("<loop>", {}),
    ("<dice>", {"temperature": 1.0, "seed": 3, "n": 2}),
    ("<cat>", {"min_tokens": 2, "bad_words": ["sat"]}),
]


def add_neighbours(engine: Engine, chain: ChainModel) -> None:
    for prompt, options in NEIGHBOURS:
        engine.add_request(prompt, [chain.id(prompt)], greedy(**options))


@pytest.fixture
def alone(engine: Engine, chain: ChainModel) -> dict[str, RequestOutput]:
    """What the neighbours give when nothing goes wrong."""
    add_neighbours(engine, chain)
    return run(engine)


def assert_only_one_failed(
    outputs: dict[str, RequestOutput], alone: dict[str, RequestOutput], caplog: pytest.LogCaptureFixture
) -> None:
    failed = outputs["bad"]
    assert failed.finished
    assert failed.error is not None
    word, error_id = failed.error.rsplit(" ", 1)
    assert word == "internal error"
    assert any(error_id in record.getMessage() and record.exc_info for record in caplog.records)
    assert "error" in [out.finish_reason for out in failed.outputs]
    for name, output in alone.items():
        assert outputs[name].outputs == output.outputs, name
        assert outputs[name].error is None


# ---- a fault in one request's handling -------------------------------------------------------------------


def raise_for(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, index: int = 0) -> None:
    """Let the ``call``-th call of a method raise for sample ``index`` of the request ``bad``."""
    original = getattr(owner, name)
    calls = 0

    def method(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        mine = self.request_id if isinstance(self, RunningRequest) else self.sequence.request_id
        if mine == "bad" and (isinstance(self, RunningRequest) or self.sequence.index == index):
            calls += 1
            if calls == call:
                raise RuntimeError("a fault of ours")
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize(("n", "index"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_fault_at_commit(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, call: int, n: int, index: int,
) -> None:  # fmt: skip
    raise_for(monkeypatch, Generation, "take", call, index)
    engine.add_request("bad", [chain.id("<loop>")], greedy(n=n))
    add_neighbours(engine, chain)
    assert_only_one_failed(run(engine), alone, caplog)


@pytest.mark.parametrize(("n", "index"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("first", [True, False])
def test_a_fault_before_dispatch(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, call: int, n: int, index: int, first: bool,
) -> None:  # fmt: skip
    raise_for(monkeypatch, Generation, "forbidden", call, index)
    if not first:
        add_neighbours(engine, chain)
    engine.add_request("bad", [chain.id("<loop>")], greedy(n=n, min_tokens=10))
    if first:
        add_neighbours(engine, chain)
    assert_only_one_failed(run(engine), alone, caplog)


def test_a_fault_before_dispatch_with_nobody_else(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raise_for(monkeypatch, Generation, "forbidden", 1)
    engine.add_request("bad", [chain.id("<loop>")], greedy(min_tokens=10))
    assert_only_one_failed(run(engine), {}, caplog)


def test_a_fault_in_the_first_rows_settings(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    rows = engine._packer.sampling_rows
    original = rows.set

    def set_(lane: int, params: SamplingParams, *args: Any) -> None:
        if params.seed == 666:
            raise RuntimeError("a fault of ours")
        original(lane, params, *args)

    monkeypatch.setattr(rows, "set", set_)
    add_neighbours(engine, chain)
    engine.add_request("bad", [chain.id("<loop>")], greedy(seed=666))
    assert_only_one_failed(run(engine), alone, caplog)


@pytest.mark.parametrize("call", [1, 2])
def test_a_fault_with_a_prompt(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, call: int,
) -> None:  # fmt: skip
    raise_for(monkeypatch, RunningRequest, "take_prompt", call)
    add_neighbours(engine, chain)
    engine.add_request("bad", [chain.id("<loop>")] * 100, greedy(max_tokens=9, prompt_logprobs=1))
    assert_only_one_failed(run(engine), alone, caplog)


@pytest.mark.parametrize("call", [1, 4])
def test_a_fault_when_its_news_are_gathered(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, call: int,
) -> None:  # fmt: skip
    raise_for(monkeypatch, Generation, "delta", call)
    engine.add_request("bad", [chain.id("<loop>")], greedy(n=2))
    add_neighbours(engine, chain)
    assert_only_one_failed(run(engine), alone, caplog)


def raise_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the news of the request ``bad`` never be gathered."""
    original = RunningRequest.delta

    def delta(self: RunningRequest) -> RequestOutput | None:
        if self.request_id == "bad":
            raise RuntimeError("a fault of ours")
        return original(self)

    monkeypatch.setattr(RunningRequest, "delta", delta)


@pytest.mark.parametrize("n", [1, 3])
def test_a_fault_whenever_its_news_are_gathered(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, n: int,
) -> None:  # fmt: skip
    raise_always(monkeypatch)
    engine.add_request("bad", [chain.id("<loop>")], greedy(n=n))
    add_neighbours(engine, chain)
    outputs = run(engine)
    assert_only_one_failed(outputs, alone, caplog)
    assert [out.finish_reason for out in outputs["bad"].outputs] == ["error"] * n


# ---- the device fails ------------------------------------------------------------------------------------


def device_error() -> jax.errors.JaxRuntimeError:
    return jax.errors.JaxRuntimeError("INTERNAL: the device fell over")


@pytest.mark.parametrize("call", [1, 2, 7])
def test_the_device_fails_at_dispatch(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    original, calls = engine._runner.sample, 0

    def sample(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise device_error()
        return original(*args)

    monkeypatch.setattr(engine._runner, "sample", sample)
    add_neighbours(engine, chain)
    outputs = run(engine)
    assert len(outputs) == len(NEIGHBOURS)
    assert all(out.finished and out.error for out in outputs.values())


def test_the_device_fails_and_one_requests_news_too(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request("bad", [chain.id("<loop>")], greedy())
    add_neighbours(engine, chain)
    raise_always(monkeypatch)
    outputs = {output.request_id: output for output in engine.fail_all(device_error())}
    assert outputs.keys() == {"bad", *(name for name, _ in NEIGHBOURS)}
    assert all(output.finished and output.error for output in outputs.values())
    assert_shown_idle(engine)


def assert_shown_idle(engine: Engine) -> None:
    numbers = engine.metrics.as_dict()
    assert numbers["num_requests_running"] == 0
    assert numbers["num_requests_waiting"] == 0
    assert numbers["kv_cache_usage_perc"] == 0
    assert numbers["kv_blocks{state=referenced}"] == 0
    assert numbers["kv_blocks{state=free}"] + numbers["kv_blocks{state=cached}"] == FLAGS["num_kv_blocks"]


class Broken:
    """A device array whose step failed: it is seen when the host asks for it."""

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise device_error()


@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("poisoned", [False, True])
def test_the_device_fails_and_it_is_seen_later(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch, call: int, poisoned: bool
) -> None:
    original, calls = engine._runner.sample, 0

    def sample(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        output = original(*args)
        if calls == call + 1 and poisoned:  # the step that ran behind it has nothing that can be used
            engine._runner.last_tokens.delete()
            jax.tree.map(lambda array: array.delete(), engine._runner._kv_cache)
        if calls != call:
            return output
        assert output.samples is not None
        return dataclasses.replace(output, samples=dataclasses.replace(output.samples, tokens=cast(Any, Broken())))

    monkeypatch.setattr(engine._runner, "sample", sample)
    add_neighbours(engine, chain)
    outputs = run(engine)
    ended = {name for name, out in outputs.items() if out.error is None}
    assert ended <= ({"<cat>"} if call > 6 else set())
    assert len(outputs) == len(NEIGHBOURS)
    assert engine.blocks_held == 0


# ---- aborts ----------------------------------------------------------------------------------------------


def sequences_of(engine: Engine, request_id: str) -> list[Any]:
    return [s for s in engine._generations if s.request_id == request_id]


def test_abort_before_the_first_step(engine: Engine, chain: ChainModel) -> None:
    engine.add_request("gone", [chain.id("<go>")], greedy(n=3))
    assert engine.num_waiting == 3
    engine.abort("gone")
    assert not engine.has_work
    assert engine.num_waiting == 0
    engine.abort("gone")
    engine.abort("never heard of")


def test_abort_does_not_end_the_text(engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: TextStream) -> str:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(TextStream, "finish", finish)
    engine.add_request("gone", [chain.id("<go>")], greedy(n=2))
    engine.step()
    engine.step()
    assert engine.blocks_held > 0
    engine.abort("gone")
    assert engine.blocks_held == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_of_the_last_request_is_shown(engine: Engine, chain: ChainModel, steps: int) -> None:
    engine.add_request("gone", [chain.id("<go>")], greedy(n=10))
    for _ in range(steps):
        engine.step()
    numbers = engine.metrics.as_dict()
    assert (numbers["num_requests_running"], numbers["num_requests_waiting"]) == ((8, 2) if steps else (0, 0))
    engine.abort("gone")
    assert_shown_idle(engine)


def test_the_seconds_of_a_step(engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch) -> None:
    now = engine._clock()
    schedule, take = engine._scheduler.schedule, engine._take

    def slow_schedule() -> Any:
        nonlocal now
        now += 1
        return schedule()

    def slow_take(*args: Any) -> None:
        nonlocal now
        now += 10
        take(*args)

    monkeypatch.setattr(engine, "_clock", lambda: now)
    monkeypatch.setattr(engine._scheduler, "schedule", slow_schedule)
    monkeypatch.setattr(engine, "_take", slow_take)
    before = engine.metrics.as_dict()
    engine.add_request("one", [chain.id("<go>")], greedy(max_tokens=1))
    run(engine)
    after = engine.metrics.as_dict()

    def spent(name: str) -> float:
        return after[name] - before[name]

    assert spent("step_device_seconds_count") == 1
    assert spent("step_host_seconds_sum") == pytest.approx(12)  # two plans, one token
    # From its dispatch, through the next step's plan, until the host saw that it had ended: before its token is taken.
    assert spent("step_device_seconds_sum") == pytest.approx(1)


def test_abort_in_the_middle_of_a_prompt(engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput]) -> None:
    add_neighbours(engine, chain)
    engine.add_request("gone", [chain.id("<loop>")] * 100, greedy(max_tokens=8))
    engine.step()
    (sequence,) = sequences_of(engine, "gone")
    assert 0 < sequence.num_computed < 100
    held, its_blocks = engine.blocks_held, len(sequence.block_tables[0])
    assert its_blocks > 5
    engine.abort("gone")
    assert engine.blocks_held == held - its_blocks
    outputs = run(engine)
    assert {name: out.outputs for name, out in outputs.items()} == {n: o.outputs for n, o in alone.items()}


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_abort_while_a_step_is_in_flight(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput], steps: int
) -> None:
    engine.add_request("gone", [chain.id("<n1>")], greedy(n=2))
    add_neighbours(engine, chain)
    outputs: dict[str, RequestOutput] = {}

    def each_step(step: int) -> None:
        if step == steps:
            assert engine._in_flight
            held = engine.blocks_held
            its_blocks = len({b for s in sequences_of(engine, "gone") for b in s.block_tables[0]})
            assert its_blocks >= 1
            engine.abort("gone")
            assert engine.blocks_held == held - its_blocks

    outputs = run(engine, each_step)
    outputs.pop("gone", None)
    assert {name: out.outputs for name, out in outputs.items()} == {n: o.outputs for n, o in alone.items()}


def test_abort_while_waiting_and_while_preempted(engine: Engine, chain: ChainModel) -> None:
    for number in range(10):
        engine.add_request(f"n{number}", [chain.id(f"<n{number}>")], greedy(max_tokens=100))
    aborted: set[str] = set()

    def each_step(step: int) -> None:
        waiting = list(engine._scheduler.waiting)
        preempted = [s for s in waiting if s.admission >= 0]
        if preempted and len(aborted) < 3:
            held = engine.blocks_held
            victim = preempted[0].request_id
            engine.abort(victim)
            aborted.add(victim)
            assert engine.blocks_held == held
        if step == 3:
            assert waiting[-1].request_id == "n9"
            assert waiting[-1].admission == -1
            engine.abort("n9")
            aborted.add("n9")

    outputs = run(engine, each_step)
    assert len(aborted) == 3
    for number in range(10):
        name = f"n{number}"
        if name not in aborted:
            assert outputs[name].outputs[0].token_ids == chain.follow(f"<{name}>", 100)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_faults_at_any_moment_leave_the_others_alone(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    faulty: set[str] = set()
    original = Generation.take

    def take(self: Generation, result: Any) -> None:
        if self.sequence.request_id in faulty:
            raise RuntimeError("a fault of ours")
        original(self, result)

    monkeypatch.setattr(Generation, "take", take)
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()

    def each_step(step: int) -> None:
        if step < 60 and rng.random() < 0.5:
            name, kind = f"r{step}", f"<n{rng.randrange(10)}>"
            length, count = rng.choice([1, 1, 5, 30, 70]), rng.choice([0, 1, 4, 20, 58])
            engine.add_request(name, [chain.id(kind)] * length, greedy(max_tokens=count, n=rng.choice([1, 2])))
            wanted[name] = chain.follow(kind, count) if count else []
        if engine._requests and rng.random() < 0.1:
            name = rng.choice(sorted(engine._requests))
            if rng.random() < 0.5:
                engine.abort(name)
                aborted.add(name)
            else:
                faulty.add(name)

    engine.add_request("first", [chain.id("<loop>")], greedy(max_tokens=100))
    wanted["first"] = chain.follow("<loop>", 100)
    outputs = run(engine, each_step)
    untouched = wanted.keys() - aborted - faulty
    assert len(untouched) > 10
    assert aborted
    assert faulty
    for name in untouched:
        assert [out.token_ids for out in outputs[name].outputs] == [wanted[name]] * len(outputs[name].outputs)


# ---- the user interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_dispatch", "_commit", "_take", "_delta"])
@pytest.mark.parametrize("call", [1, 2, 9])
def test_ctrl_c_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, call: int) -> None:
    original, calls = getattr(llm.engine, where), 0

    def method(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(llm.engine, where, method)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["<go>", "<loop>", "<dice>"], greedy(n=3), use_tqdm=False)
    assert llm.engine.blocks_held == 0
    assert llm.engine.num_waiting == 0
    assert not llm.engine._requests


def test_finished_sequences_give_their_blocks_back_at_once(engine: Engine, chain: ChainModel) -> None:
    engine.add_request("short", [chain.id("<loop>")], greedy(max_tokens=2))
    engine.add_request("long", [chain.id("<loop>")], greedy(max_tokens=20))

    def each_step(step: int) -> None:
        for sequence in engine._scheduler.running:
            assert sequence.state is SequenceState.RUNNING
        if sequences_of(engine, "short") == []:
            assert engine.blocks_held == sum(len(s.block_tables[0]) for s in sequences_of(engine, "long"))

    outputs = run(engine, each_step)
    assert {name: len(out.outputs[0].token_ids) for name, out in outputs.items()} == {"short": 2, "long": 20}
