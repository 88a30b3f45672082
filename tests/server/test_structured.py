"""``response_format`` and ``structured_outputs`` over HTTP, with a model of random weights."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from chain_model import write_chain_model
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from pagedjax import AsyncLLM
from pagedjax import grammars as grammars_module

FLAGS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "block_size": 8, "num_kv_blocks": 256, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "max_model_len": 1024,
}  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "ids": {"type": "array", "items": {"type": "integer", "maximum": 99,
                   "minimum": 0}, "maxItems": 4}},
    "required": ["kind", "ids"],
    "additionalProperties": False,
}  # fmt: skip


class Step(BaseModel):
    """A part of an answer."""

    text: str = Field(max_length=8)
    done: bool


class Answer(BaseModel):
    """What a client wants to have."""

    steps: list[Step] = Field(max_length=3)
    verdict: Literal["yes", "no"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> Path:
    words = {"<go>": ['": "', '",', "true", "false", "12", "[]"]}
    return write_chain_model(tmp_path_factory.mktemp("random"), recite=words, max_model_len=1024).folder


@pytest.fixture
async def served(folder: Path, served_with: Any) -> Any:
    engine = await asyncio.to_thread(lambda: AsyncLLM(str(folder), say=lambda line: None, **FLAGS))
    return await served_with(engine, served_model_name="tiny")


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 800, "seed": 1}
    asked |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return asked | fields


def said(answer: dict[str, Any]) -> list[str]:
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_way_to_ask(served: Any, path: str) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    for fields in ({"response_format": named}, {"structured_outputs": {"json": SCHEMA}},
                   {"structured_outputs": {"json": json.dumps(SCHEMA)}}):  # fmt: skip
        status, answer = await served.post(path, body(path, n=3, **fields))
        assert status == 200
        for text in said(answer):
            jsonschema.validate(json.loads(text), SCHEMA)
    status, answer = await served.post(path, body(path, response_format={"type": "json_object"}, max_tokens=30))
    assert status == 200
    assert (answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]).startswith("{")
    _, answer = await served.post(path, body(path, structured_outputs={"regex": "[ab]{3}"}, n=4))
    assert all(re.fullmatch("[ab]{3}", text) for text in said(answer))
    _, answer = await served.post(path, body(path, structured_outputs={"choice": ["so", "or so"]}))
    assert said(answer)[0] in ("so", "or so")
    _, answer = await served.post(path, body(path, structured_outputs={"grammar": 'start: "x" "y"'}))
    assert said(answer) == ["xy"]
    status, answer = await served.post(path, body(path, response_format={"type": "text"}, max_tokens=4))
    assert status == 200


async def test_the_official_client_parses(served: Any) -> None:
    client = AsyncOpenAI(base_url=served.url + "/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "Is it?"}]
    completion = await client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Answer, max_tokens=800, seed=3
    )
    parsed = completion.choices[0].message.parsed
    assert isinstance(parsed, Answer)
    async with client.chat.completions.stream(
        model="tiny", messages=messages, response_format=Answer, max_tokens=800, seed=3
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    await client.close()


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be given when type is"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema", "only then"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name",
     "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
     "response_format", 'Unimplemented keys: ["not"]'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "b" * 70_000}}}},
     "response_format", "over the limit"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "has regex, choice"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "string"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "1 to 1024"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "string"),
    ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs", "missing"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", "not a field"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs",
     "excludes response_format"),
    ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words", "must be absent"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids", "must be absent"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2}, "structured_outputs", "use_beam_search"),
    ({"response_format": {"type": "json_object"}, "use_beam_search": True, "n": 2}, "response_format",
     "use_beam_search"),
]  # fmt: skip


async def test_wrong_requests(served: Any) -> None:
    for path in (CHAT, COMPLETIONS):
        for fields, param, words in WRONG:
            status, answer = await served.post(path, body(path, **fields))
            assert (status, answer["error"]["param"]) == (400, param), (fields, answer)
            assert words in answer["error"]["message"], answer
    _, blocks = await served.get("/debug/blocks")
    assert all(block["state"] != "referenced" for block in blocks["blocks"])


async def test_without_the_extra(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "llguidance", None)
    status, answer = await served.post(CHAT, body(CHAT, response_format={"type": "json_object"}))
    assert status == 400
    assert answer["error"]["param"] == "response_format"
    assert "pagedjax[structured]" in answer["error"]["message"]
