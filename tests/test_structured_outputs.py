"""Outputs that match a schema, a regular expression, a choice or a grammar, from a model with random weights."""

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chain_model import write_chain_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import run

from pagedjax import AsyncLLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from pagedjax import grammars as grammars_module
from pagedjax.config import EngineConfig
from pagedjax.engine import Engine
from pagedjax.grammars import GrammarError, Grammars
from pagedjax.loading import load_engine

FLAGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 1024,
}
WIDE, TIGHT = 8 * 128, 136  # blocks for eight requests of the greatest length, and for little more than one

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6)
leaves = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-50, 50),
              st.integers(0, 200)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(text, st.integers(-9, 9), st.none(), st.booleans()),
                                                       min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, text),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "integer"},
                     {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "string", "format": "date"}]),
)  # fmt: skip


def _object(properties: dict[str, Any], number: int) -> dict[str, Any]:
    required = list(properties)[: number % (len(properties) + 1)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(text, inner, max_size=4), st.integers(0, 9)),
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> Path:
    words = {"<go>": ["true", "null", '": "', '",', "tt", "fa", "1234", "-1", "[]", "}}", "  ", "\\n", "ö", "語"]}
    return write_chain_model(tmp_path_factory.mktemp("random"), recite=words, max_model_len=1024).folder


@pytest.fixture(scope="module")
def wide(folder: Path) -> Engine:
    return load_engine(EngineConfig(model=str(folder), num_kv_blocks=WIDE, **FLAGS))


@pytest.fixture(scope="module")
def tight(folder: Path) -> Engine:
    return load_engine(EngineConfig(model=str(folder), num_kv_blocks=TIGHT, **FLAGS))


def ask(structured: StructuredOutputsParams | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 900, "seed": 0, "structured_outputs": structured} | options)


def answers(engine: Engine, asked: list[SamplingParams], each_step: Callable[[int], None] = lambda step: None) -> Any:
    """Each request's output, all run at once."""
    for number, params in enumerate(asked):
        engine.add_request(str(number), [3 + number], params)
    outputs = run(engine, each_step)
    assert engine.blocks_held == 0
    return [outputs[str(number)] for number in range(len(asked))]


def texts(output: RequestOutput) -> list[str]:
    assert not output.error
    assert [choice.finish_reason for choice in output.outputs] == ["stop"] * len(output.outputs)
    return [choice.text for choice in output.outputs]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(schemas, min_size=8, max_size=8))
def test_schemas(wide: Engine, drawn: list[dict[str, Any]]) -> None:
    """8 at once, 320 in all."""
    asked = [ask(StructuredOutputsParams(json=schema), seed=i) for i, schema in enumerate(drawn)]
    for schema, output in zip(drawn, answers(wide, asked), strict=True):
        for said in texts(output):
            jsonschema.validate(json.loads(said), schema)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(schemas, min_size=4, max_size=4))
def test_schemas_of_forked_samples_in_a_tight_pool(wide: Engine, tight: Engine, drawn: list[dict[str, Any]]) -> None:
    """The same tokens as with room for all, and valid."""
    asked = [ask(StructuredOutputsParams(json=schema), seed=i, n=4) for i, schema in enumerate(drawn)]
    found, expected = answers(tight, asked), answers(wide, asked)
    for schema, output, other in zip(drawn, found, expected, strict=True):
        assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in other.outputs]
        for said in texts(output):
            jsonschema.validate(json.loads(said), schema)


def test_the_tight_pool_preempted(tight: Engine) -> None:
    """Or the test above shows less than it says."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 9, "maxItems": 9}
    before = tight.metrics.as_dict()["num_preemptions"]
    for output in answers(tight, [ask(StructuredOutputsParams(json=schema), seed=i, n=4) for i in range(3)]):
        for said in texts(output):
            jsonschema.validate(json.loads(said), schema)
    assert tight.metrics.as_dict()["num_preemptions"] > before


@pytest.mark.parametrize("regex", ["ab+c", "(yes|no)( please){0,3}", "[0-9]{3}-[0-9]{4}", "[ä-ü]{2}😀?", "a{5}"])
def test_regex(wide: Engine, regex: str) -> None:
    [output] = answers(wide, [ask(StructuredOutputsParams(regex=regex), n=8)])
    assert all(re.fullmatch(regex, said) for said in texts(output))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(choices=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=5))
def test_choice(wide: Engine, choices: list[str]) -> None:
    [output] = answers(wide, [ask(StructuredOutputsParams(choice=choices), n=4)])
    assert set(texts(output)) <= set(choices)


def test_choices_that_begin_alike(wide: Engine) -> None:
    """One of them ends where the other may go on: there the model decides, by its end token."""
    params = ask(StructuredOutputsParams(choice=["t", "tt"]), n=32, logit_bias={wide._admission._eos[0]: 5})
    assert set(texts(answers(wide, [params])[0])) == {"t", "tt"}


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start? ")" | "x"',
        'root ::= "(" root? ")" | "x"',
    ],
    ids=["lark", "gbnf"],
)
def test_grammar(wide: Engine, grammar: str) -> None:
    [output] = answers(wide, [ask(StructuredOutputsParams(grammar=grammar), n=8)])
    for said in texts(output):
        while "()" in said or "(x)" in said:
            said = said.replace("(x)", "x").replace("()", "x")
        assert said == "x"


def test_any_json_object(wide: Engine) -> None:
    params = ask(StructuredOutputsParams(json_object=True), n=4, max_tokens=300)
    for choice in answers(wide, [params])[0].outputs:
        assert choice.text.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.text), dict)


def test_an_end_that_the_model_is_not_asked_for(wide: Engine) -> None:
    """A grammar that can't go on ends the sequence at once, with ``ignore_eos`` and ``min_tokens`` too."""
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        [output] = answers(wide, [ask(StructuredOutputsParams(choice=["true"]), **options)])
        assert texts(output) == ["true"]
        assert wide._admission._eos[0] not in output.outputs[0].token_ids


def test_an_end_that_the_model_chooses(wide: Engine) -> None:
    [output] = answers(wide, [ask(StructuredOutputsParams(regex="(ab)*"), ignore_eos=True, n=4)])
    assert all(re.fullmatch("(ab)*", said) for said in texts(output))


def test_stop_strings_and_limits_come_first(wide: Engine) -> None:
    regex = StructuredOutputsParams(regex="a{20}")
    stopped, limited = answers(wide, [ask(regex, stop=["aaa"]), ask(regex, max_tokens=5, seed=None)])
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("", "aaa")
    assert (limited.outputs[0].text, limited.outputs[0].finish_reason) == ("aaaaa", "length")


def test_nobody_else_notices(wide: Engine) -> None:
    """Requests beside structured ones, and these themselves, get the tokens they get alone."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 5}
    bad_words = SamplingParams(seed=5, max_tokens=60, bad_words=["tt", "ab", "true"], ignore_eos=True)
    asked = [ask(StructuredOutputsParams(json=schema)), ask(None, max_tokens=60, ignore_eos=True), bad_words]
    together = answers(wide, asked)
    for number, params in enumerate(asked):
        wide.add_request("alone", [3 + number], params)
        alone = run(wide)["alone"]
        assert alone.outputs[0].token_ids == together[number].outputs[0].token_ids


def test_a_structured_request_gets_a_token_every_step(wide: Engine) -> None:
    steps: list[int] = []
    answers(
        wide, [ask(StructuredOutputsParams(regex="a{40}")), ask(None, max_tokens=60, ignore_eos=True)], steps.append
    )
    wide.add_request("alone", [3], ask(StructuredOutputsParams(regex="a{40}")))
    alone: list[int] = []
    run(wide, alone.append)
    assert len(alone) <= 43
    assert len(steps) <= 63


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"json": {"type": "object", "not": {}}}, 'structured_outputs: Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, 'structured_outputs: Unimplemented keys: ["uniqueItems"]'),
        ({"json": "{"}, "structured_outputs: "),
        ({"json": {"type": "string", "pattern": "^(?=a)b$"}}, "look-ahead"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: missing"}, "missing"),
        ({"regex": "(" * 3000 + ")" * 3000}, "structured_outputs: "),
        ({"json": {"const": "a", "enum": ["b"]}}, "structured_outputs: "),
    ],
)
def test_wrong_grammars(wide: Engine, structured: dict[str, Any], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^structured_outputs") as error:
        wide.add_request("wrong", [3], ask(StructuredOutputsParams(**structured)))
    assert message in str(error.value)
    assert len(str(error.value)) < 400
    assert time.monotonic() - began < 5
    assert not wide.has_work


@pytest.mark.parametrize(
    "regex",
    ["(a{1,1000}){1,1000}(b{1,1000}){1,1000}", "(a*)*b", "((a|b|ab)*c){1,100}", "[a-z]*[b-y]*[c-x]*a{900}",
     "(.*a.{300}|.*b.{299}c)*", "(x+x+)+y", ".{1,60000}a.{1,60000}"],
)  # fmt: skip
def test_no_regex_holds_up_the_engine(wide: Engine, regex: str) -> None:
    """These are built to be hard: some 10 ms a step at the most."""
    wide.add_request("hostile", [3], ask(StructuredOutputsParams(regex=regex), n=4, max_tokens=100))
    moments = [time.monotonic()]
    run(wide, lambda step: moments.append(time.monotonic()))
    assert max(after - before for before, after in itertools.pairwise(moments)) < 1
    assert wide.blocks_held == 0


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({}, "structured_outputs must have one of json, json_object, regex, choice, grammar, and has none"),
        ({"regex": "a", "choice": ["a"]}, "and has regex, choice"),
        ({"json": 3}, "structured_outputs.json must be a JSON schema"),
        ({"choice": []}, "structured_outputs.choice must be a list of 1 to 1024 texts"),
        ({"choice": "ab"}, "structured_outputs.choice must be"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must be"),
        ({"regex": 3}, "structured_outputs.regex must be a text"),
        ({"regex": "a" * 70_000}, "structured_outputs.regex has 70000 bytes, over the limit of 65536"),
        ({"json": {"a": object()}}, "structured_outputs cannot be written as JSON"),
    ],
)
def test_wrong_parameters(structured: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        StructuredOutputsParams(**structured)


@pytest.mark.parametrize("options", [{"bad_words": ["a"]}, {"allowed_token_ids": [1]}])
def test_what_does_not_go_together(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{min(options)} must be absent where structured_outputs is given"):
        ask(StructuredOutputsParams(regex="a"), **options)
    with pytest.raises(ValueError, match="structured_outputs must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_without_the_extra(wide: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "llguidance", None)
    with pytest.raises(
        ValueError, match=r"^structured_outputs needs a package .* pip install 'pagedjax\[structured\]'"
    ):
        wide.add_request("x", [3], ask(StructuredOutputsParams(regex="never seen before")))
    assert not wide.has_work


def test_without_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer, and this model has none"):
        Grammars(None, 10, [1]).compile(StructuredOutputsParams(regex="a"))


def test_a_grammar_that_comes_to_be_too_complex(wide: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own request ends with an error that says so; the one beside it goes on."""
    masks = Grammars.masks

    def fail_late(self: Grammars, states: Any) -> Any:
        found = masks(self, states)
        return [GrammarError("structured_outputs has come to be too complex: so it has") for _ in found]

    asked = [ask(StructuredOutputsParams(regex="a{40}")), ask(None, max_tokens=60, ignore_eos=True)]

    def each_step(step: int) -> None:
        if step == 5:
            monkeypatch.setattr(Grammars, "masks", fail_late)

    failed, other = answers(wide, asked, each_step)
    assert failed.error == "structured_outputs has come to be too complex: so it has"
    assert failed.outputs[0].finish_reason == "error"
    assert 0 < len(failed.outputs[0].token_ids) < 40
    assert len(other.outputs[0].token_ids) == 60


def test_grammars_are_kept(wide: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = StructuredOutputsParams(json={"type": "boolean"})
    first = wide.grammars.compile(params)
    assert wide.grammars.compile(StructuredOutputsParams(json='{"type": "boolean"}')) is first
    monkeypatch.setattr(grammars_module, "_CACHED", 2)
    small = Grammars(wide.tokenizer, wide.vocab_size, [wide._admission._eos[0]])
    a, b, c = (StructuredOutputsParams(regex=regex) for regex in "abc")
    kept = small.compile(a)
    small.compile(b)
    assert small.compile(a) is kept
    small.compile(c)
    assert small.compile(a) is kept
    assert len(small._compiled) == 2


async def test_a_slow_compilation_holds_up_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = Grammars.compile
    compiling = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(self: Grammars, params: StructuredOutputsParams) -> Any:
        loop.call_soon_threadsafe(compiling.set)
        time.sleep(0.5)
        return compile_(self, params)

    monkeypatch.setattr(Grammars, "compile", slow)
    llm = AsyncLLM(str(folder), num_kv_blocks=WIDE, say=lambda line: None, **FLAGS)
    try:

        async def last(params: SamplingParams) -> RequestOutput:
            return [output async for output in llm.generate([3], params)][-1]

        structured = asyncio.create_task(last(ask(StructuredOutputsParams(choice=["true"]))))
        await compiling.wait()
        other = await last(ask(None, max_tokens=5, ignore_eos=True))
        assert len(other.outputs[0].token_ids) == 5
        assert not structured.done()
        assert texts(await structured) == ["true"]
        monkeypatch.setattr("pagedjax.async_engine._COMPILE_SECONDS", 0.05)
        with pytest.raises(ValueError, match=r"structured_outputs took more than 0.05 s to compile"):
            await last(ask(StructuredOutputsParams(choice=["true"])))
        monkeypatch.setattr("pagedjax.async_engine._COMPILE_SECONDS", 10.0)
        monkeypatch.setattr(
            Grammars, "masks", lambda self, states: [GrammarError("structured_outputs: no")] * len(states)
        )
        with pytest.raises(RequestError, match="structured_outputs: no"):
            await last(ask(StructuredOutputsParams(choice=["true"])))
    finally:
        await llm.shutdown()
