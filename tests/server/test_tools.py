"""Tools over HTTP: what the model is told of, and its calls as the official client sees them, whole and streamed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from chain_model import write_chain_model
from fake_engine import FakeLLM, byte_tokenizer

from pagedjax import AsyncLLM

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} within <tool_call></tool_call>{% endif %}{% for message in messages %}"
    "<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls %}"
    "{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}{% endfor %}<assistant>"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SAID = (
    'Let me see ☕. <tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln </tool_call>"}}\n</tool_call>'
)
HELLO: Any = [{"role": "user", "content": "Is it raining?"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM(script=SAID, tokenizer=byte_tokenizer(TEMPLATE), max_model_len=2000)


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_the_client_sees_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see ☕. "
        found: Any = choice.message.tool_calls
        assert [call.function.name for call in found] == ["weather", "weather"]
        assert [json.loads(call.function.arguments)["city"] for call in found] == ["Bonn", "Köln </tool_call>"]
        assert len({call.id for call in found}) == 2


def test_streamed_calls_join_to_the_whole(client: openai.OpenAI) -> None:
    whole: Any = client.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER]).choices[0]
    with client.chat.completions.stream(model="tiny", messages=HELLO, tools=[WEATHER]) as stream:
        final: Any = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == whole.message.content
    calls = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]


async def test_what_the_model_is_told(served: Any, llm: FakeLLM) -> None:
    """Of the tools, and of earlier calls and their results; of nothing where tool_choice is none."""
    assert llm.tokenizer is not None
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    for choice in ("auto", "none"):
        body = {"model": "tiny", "messages": turns, "tools": [WEATHER], "tool_choice": choice}
        status, answer = await served.post(CHAT, body)
        assert status == 200, answer
        prompt = llm.tokenizer.decode(llm.seen[-1][0])
        assert prompt.endswith("<user>Is it raining?<assistant>weather(Rome)<tool>sunny<assistant>")
        assert ("The weather in a city." in prompt) == (choice == "auto")
        message = answer["choices"][0]["message"]
        assert ("tool_calls" in message) == (choice == "auto")
        assert choice == "auto" or message["content"] == SAID


async def test_an_answer_without_calls(served: Any, llm: FakeLLM) -> None:
    for said in ("No <tool_call>{oops}</tool_call>.", "plain", "cut <tool_call>{"):
        llm.script = said
        _, answer = await served.post(CHAT, {"model": "tiny", "messages": HELLO, "tools": [WEATHER]})
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": said, "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_that_is_cut_off(served: Any) -> None:
    body = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "max_tokens": 40}
    _, answer = await served.post(CHAT, body)
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (SAID.encode()[:40].decode(), "length")


async def test_formats(served_with: Any, llm: FakeLLM) -> None:
    """By the template, or as the server is told; special tokens are seen by the reader and not by the client."""
    for parser, said in (
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}]'),
        ("pythonic", '[weather(city="Bonn")]'),
        ("llama3_json", '<s>{"name": "weather", "parameters": {"city": "Bonn"}}'.removeprefix("<s>")),
    ):
        llm.script = said
        served = await served_with(tool_call_parser=parser)
        _, answer = await served.post(CHAT, {"model": "tiny", "messages": HELLO, "tools": [WEATHER]})
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Bonn"}
    llm.tokenizer = byte_tokenizer("{{ tools }}{{ messages[0].content }}")
    served = await served_with()
    status, answer = await served.post(CHAT, {"model": "tiny", "messages": HELLO, "tools": [WEATHER]})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in answer["error"]["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> Path:
    words = {"<go>": ['": "', '",', "weather", "city", "[]"]}
    folder = tmp_path_factory.mktemp("random")
    return write_chain_model(folder, recite=words, chat_template=TEMPLATE, max_model_len=1024).folder


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_have_to_be_made(folder: Path, served_with: Any, stream: bool) -> None:
    """A model with random weights calls what it must with arguments that are right."""
    flags: Any = {"load_format": "dummy", "dtype": "float32", "block_size": 8, "num_kv_blocks": 256, "max_num_seqs": 8}
    engine = await asyncio.to_thread(lambda: AsyncLLM(str(folder), say=lambda line: None, **flags))
    served = await served_with(engine, served_model_name="tiny")
    client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    other: Any = {"type": "function", "function": {"name": "stop"}}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", {"weather", "stop"}), (named, {"weather"})):
        options: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER, other], "tool_choice": choice}
        options |= {"parallel_tool_calls": False, "max_tokens": 600, "seed": 4, "n": 3}
        if stream:
            async with client.chat.completions.stream(**options) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**options)
        for found in answer.choices:
            calls: Any = found.message.tool_calls
            if found.finish_reason == "length":  # `stop` may have any object for its arguments
                continue
            assert found.finish_reason == "tool_calls"
            assert not found.message.content
            assert len(calls) == 1
            assert calls[0].function.name in names
            if calls[0].function.name == "weather":
                assert json.loads(calls[0].function.arguments)["city"] in ("Bonn", "Rome")
    await client.close()
