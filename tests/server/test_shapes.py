"""Answers have OpenAI's and vLLM's shapes, and a stream adds up to what is not streamed."""

import json
from typing import Any

import pytest
from fake_engine import SCRIPT, FakeLLM

HELLO = [{"role": "user", "content": "Hi"}]
BYTES = SCRIPT.encode()


async def events(served: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; it must end with [DONE]."""
    async with served.session.post(served.url + path, json=body | {"stream": True}) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        parts = (await answer.read()).decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a completion stream put together again."""
    whole: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            known = whole.setdefault(choice["index"], choice)
            if known is choice:
                continue
            known["text"] += choice["text"]
            known["token_ids"] += choice["token_ids"]
            for key, values in (choice["logprobs"] or {}).items():
                known["logprobs"][key] += values
            known |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return whole


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"logprobs": 2},
        {"echo": True},
        {"echo": True, "logprobs": 2, "n": 2},
        {"echo": True, "prompt": [[257, 5], [256, 72, 105]]},
        {"prompt": ["a", "é"], "logprobs": 0, "echo": True},
        {"stop": "y", "logprobs": 1},
        {"max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt_logprobs": 1, "n": 2},
        {"prompt_logprobs": 3, "echo": True, "logprobs": 1},
    ],
    ids=str,
)
async def test_a_stream_adds_up(served: Any, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": "Hé", "max_tokens": 30, "return_token_ids": True} | more
    status, whole = await served.post("/v1/completions", body)
    assert status == 200, whole
    chunks = await events(served, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    choices = joined(chunks)
    assert [choices[i] for i in sorted(choices)] == whole["choices"]
    for chunk in chunks:
        assert chunk.keys() == {"id", "object", "created", "model", "choices", "usage"}
        assert chunk["object"] == whole["object"] == "text_completion"


async def test_echo_with_logprobs(served: Any) -> None:
    body = {"model": "tiny", "prompt": "Hé", "max_tokens": 2, "echo": True, "logprobs": 2}
    _, answer = await served.post("/v1/completions", body)
    [choice] = answer["choices"]
    assert choice["text"] == "Hé t"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<s>", "H", "\ufffd", "\ufffd", " ", "t"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [
        2,
        1,
        1,
        2,
        2,
    ]  # two that look alike are one


async def test_scoring(served: Any) -> None:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 0}
    _, answer = await served.post("/v1/completions", body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(served: Any) -> None:
    _, answer = await served.post("/v1/completions", {"model": "tiny", "prompt": [7, 8], "prompt_logprobs": 1})
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["8"].keys() == {"logprob", "rank", "decoded_token"}
    assert second["8"]["rank"] == 2
    body = {"model": "tiny", "prompt": [7, 8], "prompt_logprobs": 1, "echo": True, "logprobs": 4}
    _, answer = await served.post("/v1/completions", body)
    assert answer["choices"][0]["prompt_logprobs"] == [None, second]
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][1]) == 4
    body = {
        "model": "tiny",
        "messages": HELLO,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "max_tokens": 2,
    }
    _, answer = await served.post("/v1/chat/completions", body)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert len(answer["choices"][0]["token_ids"]) == 2
    first = (await events(served, "/v1/chat/completions", body))[0]
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]


async def test_stops(served: Any) -> None:
    body = {"model": "tiny", "messages": HELLO, "stop": ["c", "x"]}
    _, answer = await served.post("/v1/chat/completions", body)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": " the ", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "c")
    chunks = await events(served, "/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == " the "
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_events_carry_whole_characters(served: Any) -> None:
    chunks = await events(served, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 100})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == SCRIPT
    assert all(texts[:-1])  # nothing is sent for the first bytes of a character
    assert len(texts) <= len(SCRIPT) + 1


async def test_an_error_in_a_stream_ends_it(served: Any, llm: FakeLLM) -> None:
    body = {"model": "tiny", "prompt": "boom", "stream": True}
    async with served.session.post(served.url + "/v1/completions", json=body) as answer:
        text = (await answer.read()).decode()
        request_id = answer.headers["X-Request-Id"]
    last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert request_id in last["error"]["message"]
    assert "[DONE]" not in text
    status, _ = await served.post("/v1/completions", body | {"prompt": "x", "stream": False})
    assert status == 200
    assert not llm.running


async def test_tokens(served: Any) -> None:
    _, answer = await served.post("/tokenize", {"model": "tiny", "prompt": "Hi"})
    assert answer == {"tokens": [256, *answer["tokens"][1:]], "count": 3, "max_model_len": 256}
    _, text = await served.post("/detokenize", {"model": "tiny", "tokens": answer["tokens"]})
    assert text == {"prompt": "<s>Hi"}
    _, bare = await served.post("/tokenize", {"model": "tiny", "prompt": "Hi", "add_special_tokens": False})
    assert bare["tokens"] == answer["tokens"][1:]

    async def chat(**more: Any) -> str:
        _, answer = await served.post("/tokenize", {"model": "tiny", "messages": HELLO} | more)
        _, text = await served.post("/detokenize", {"model": "tiny", "tokens": answer["tokens"]})
        return text["prompt"]

    assert await chat() == "<s><user>Hi\n<assistant>"
    assert await chat(add_generation_prompt=False) == "<s><user>Hi\n"
    assert await chat(continue_final_message=True) == "<s><user>Hi"
    assert await chat(chat_template_kwargs={"shout": 1}) == "<s><user>Hi\n!<assistant>"
    assert await chat(add_special_tokens=True) == "<s><s><user>Hi\n<assistant>"
    assert (
        await chat(messages=[{"role": "developer", "content": "Be"}, *HELLO]) == "<s><system>Be\n<user>Hi\n<assistant>"
    )


async def test_chat_limits(served: Any, llm: FakeLLM) -> None:
    for more in (
        {"max_completion_tokens": 3},
        {"max_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ):
        _, answer = await served.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO} | more)
        assert answer["usage"]["completion_tokens"] == 3
    _, answer = await served.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert answer["usage"]["completion_tokens"] == 16
    assert BYTES[:16].decode().startswith(answer["choices"][0]["text"][:10])
    assert len(llm.seen) == 4
