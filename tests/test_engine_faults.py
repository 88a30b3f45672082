"""What goes wrong for one request stays with it, and leaves nothing behind."""

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from chain_model import ChainModel
from small_engine import FLAGS, MAX_MODEL_LEN, TEXT, write_small_model

from pagedjax import LLM, RequestOutput, SamplingParams
from pagedjax.engine import Engine
from pagedjax.generation import Generation, RunningRequest
from pagedjax.request import OutputCollector, SequenceState


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> ChainModel:
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
    sound.append(llm)


@pytest.fixture
def engine(llm: LLM) -> Engine:
    return llm.engine


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 80} | options)


def assert_empty(engine: Engine) -> None:
    run(engine)  # a step that is still in flight
    assert engine.blocks_held == 0
    assert engine.num_waiting == 0
    assert not engine.has_work
    assert not engine._generations
    assert sorted(engine._scheduler._free_lanes) == list(range(FLAGS["max_num_seqs"]))
    engine._pool.check_integrity([])


def run(engine: Engine, each_step: Callable[[int], None] = lambda step: None) -> dict[str, RequestOutput]:
    """Step until there is no work; the outputs by request."""
    collectors: dict[str, OutputCollector] = {}
    outputs: dict[str, RequestOutput] = {}
    for step in range(3000):
        if not engine.has_work:
            return outputs
        each_step(step)
        for delta in engine.step():
            assert delta.request_id not in outputs or not outputs[delta.request_id].finished
            collector = collectors.setdefault(delta.request_id, OutputCollector())
            outputs[delta.request_id] = collector.add(delta)
    pytest.fail("the engine never comes to an end")


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


def raise_for(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, index: int = 0
) -> None:
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
    rows = engine._runner.sampling_rows
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


# ---- the device fails ------------------------------------------------------------------------------------


def device_error() -> jax.errors.JaxRuntimeError:
    return jax.errors.JaxRuntimeError("INTERNAL: the device fell over")


@pytest.mark.parametrize("call", [1, 2, 7])
def test_the_device_fails_at_dispatch(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    original, calls = engine._runner.dispatch, 0

    def dispatch(step_input: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise device_error()
        return original(step_input)

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)
    add_neighbours(engine, chain)
    outputs = run(engine)
    assert len(outputs) == len(NEIGHBOURS)
    assert all(out.finished and out.error for out in outputs.values())


class Broken:
    """A device array whose step failed: it is seen when the host asks for it."""

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise device_error()


@pytest.mark.parametrize("call", [1, 2, 7])
@pytest.mark.parametrize("poisoned", [False, True])
def test_the_device_fails_and_it_is_seen_later(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch, call: int, poisoned: bool
) -> None:
    original, calls = engine._runner.dispatch, 0

    def dispatch(step_input: Any) -> Any:
        nonlocal calls
        calls += 1
        output = original(step_input)
        if calls == call + 1 and poisoned:  # the step that ran behind it has nothing that can be used
            engine._runner._last_tokens.delete()
            jax.tree.map(lambda array: array.delete(), engine._runner._kv_cache)
        if calls != call:
            return output
        return dataclasses.replace(output, samples=dataclasses.replace(output.samples, tokens=Broken()))

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)
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


def test_abort_in_the_middle_of_a_prompt(
    engine: Engine, chain: ChainModel, alone: dict[str, RequestOutput]
) -> None:
    add_neighbours(engine, chain)
    engine.add_request("gone", [chain.id("<loop>")] * 120, greedy(max_tokens=8))
    engine.step()
    (sequence,) = sequences_of(engine, "gone")
    assert 0 < sequence.num_computed < 120
    held, its_blocks = engine.blocks_held, len(sequence.block_table)
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
            its_blocks = sum(len(s.block_table) for s in sequences_of(engine, "gone"))
            assert its_blocks >= 2
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


# ---- requests that can't be served -----------------------------------------------------------------------

BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "prompt"),
    ([5, 100_000], {}, "prompt"),
    ([-1], {}, "prompt"),
    ([1.5], {}, "prompt"),
    (["a"], {}, "prompt"),
    ([None], {}, "prompt"),
    ([1] * (MAX_MODEL_LEN + 1), {"max_tokens": 0}, "prompt"),
    ([1] * MAX_MODEL_LEN, {"max_tokens": 1}, "prompt"),
    ([1] * MAX_MODEL_LEN, {"max_tokens": None}, "prompt"),
    ([1], {"max_tokens": MAX_MODEL_LEN}, "prompt"),
    ([1], {"stop_token_ids": [100_000]}, "stop_token_ids"),
    ([1], {"allowed_token_ids": [1, 100_000]}, "allowed_token_ids"),
    ([1], {"logit_bias": {100_000: 1.0}}, "logit_bias"),
]


@pytest.mark.parametrize(("prompt", "options", "name"), BAD)
def test_bad_requests_name_the_field_and_leave_nothing(
    engine: Engine, prompt: list[Any], options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        engine.add_request("bad", prompt, greedy(**options))
    assert not engine.has_work
    assert engine.num_waiting == 0


BAD_PARAMS: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", 1.0), ("best_of", 0), ("temperature", -0.1), ("temperature", 2.1),
    ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", 2**64),
    ("seed", "x"), ("stop", [""]), ("stop", [1]), ("stop", ["x"] * 17), ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]), ("stop_token_ids", 5), ("stop", 5), ("bad_words", 5), ("min_tokens", -1),
    ("max_tokens", -1), ("max_tokens", True), ("logprobs", 21), ("prompt_logprobs", -1), ("logit_bias", [1]),
    ("logit_bias", {"1": 1}), ("logit_bias", {1: 101}), ("allowed_token_ids", []), ("allowed_token_ids", 7),
    ("bad_words", [""]), ("ignore_eos", 1), ("skip_special_tokens", None), ("include_stop_str_in_output", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_bad_parameters_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        SamplingParams(**{name: value})


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(ValueError, match=r"^min_tokens .*max_tokens"):
        SamplingParams(min_tokens=17)


def test_the_third_of_several_sequences_is_refused(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = engine._scheduler.add, 0

    def add(sequence: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("7 blocks wanted, the pool has 6")
        original(sequence)

    monkeypatch.setattr(engine._scheduler, "add", add)
    with pytest.raises(ValueError, match="blocks wanted"):
        engine.add_request("bad", [chain.id("<go>")], greedy(n=4))
    assert not engine.has_work
    assert engine.num_waiting == 0
    assert not engine._generations


def test_an_id_that_is_in_use(engine: Engine, chain: ChainModel) -> None:
    engine.add_request("twice", [chain.id("<go>")], greedy())
    with pytest.raises(ValueError, match=r"^request_id 'twice'"):
        engine.add_request("twice", [chain.id("<loop>")], greedy())
    assert run(engine)["twice"].outputs[0].text == TEXT
    engine.add_request("twice", [chain.id("<cat>")], greedy())
    assert run(engine)["twice"].outputs[0].text.startswith("The cat")


def test_one_bad_prompt_among_several(llm: LLM) -> None:
    with pytest.raises(ValueError, match="^prompt"):
        llm.generate([[1], [2], [100_000]], greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="^params has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], [greedy()], use_tqdm=False)


def test_a_model_without_a_tokenizer(llm: LLM, chain: ChainModel, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(chain.folder / name, tmp_path)
    bare = LLM(str(tmp_path), **FLAGS)
    (out,) = bare.generate([chain.id("<go>")], greedy(logprobs=1), use_tqdm=False)
    assert out.outputs[0].token_ids == chain.follow("<go>")
    assert out.outputs[0].text == ""
    assert out.outputs[0].logprobs is not None
    assert out.outputs[0].logprobs[0][ord("H")].decoded_token is None
    for name, value in (("stop", "x"), ("bad_words", ["x"])):
        with pytest.raises(ValueError, match=f"^{name} needs a tokenizer"):
            bare.generate([1], greedy(**{name: value}), use_tqdm=False)
    with pytest.raises(ValueError, match="^prompt is text"):
        bare.generate("x", use_tqdm=False)
    assert_empty(bare.engine)


# ---- the user interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["_dispatch", "_commit", "_fetch", "_observe_step"])
@pytest.mark.parametrize("call", [1, 2, 9])
def test_ctrl_c_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, call: int
) -> None:
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
            assert engine.blocks_held == sum(len(s.block_table) for s in sequences_of(engine, "long"))

    outputs = run(engine, each_step)
    assert {name: len(out.outputs[0].token_ids) for name, out in outputs.items()} == {"short": 2, "long": 20}
