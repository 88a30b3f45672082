"""The official client, used as people use it."""

import asyncio
from typing import Any

import openai
import pytest
from fake_engine import SCRIPT, FakeLLM

from server.logprobs import LOWEST_LOGPROB

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Once", max_tokens=9, n=2)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].text == " the caf\ufffd"  # nine bytes end within the accented letter
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        18,
        23,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 3  # type: ignore[union-attr]


def test_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt=["a", "b"],
            n=2,
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = dict.fromkeys(range(4), "")
    finished = []
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        [choice] = chunk.choices
        assert "\ufffd" not in choice.text
        assert choice.index not in finished
        texts[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.finish_reason == "stop"
            finished.append(choice.index)
    assert texts == dict.fromkeys(range(4), SCRIPT)
    assert sorted(finished) == [0, 1, 2, 3]
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == 4 * len(SCRIPT.encode())
    assert usage.prompt_tokens == 4


def test_chat(client: openai.OpenAI, llm: FakeLLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert [c.message.content for c in answer.choices] == [SCRIPT, SCRIPT]
    assert answer.choices[0].message.role == "assistant"
    assert llm.tokenizer is not None
    ids, params = llm.seen[0]
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<s><system>Be kind.\n<user>Hi\n<assistant>"  # one <s>: the template's
    )
    assert params.max_tokens is None
    # What a client gets it can send back.
    history = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on"}]
    client.chat.completions.create(model="tiny", messages=history)


def test_chat_stream_begins_with_roles(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, n=2) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", "assistant"]
    assert [c.choices[0].index for c in chunks[:2]] == [0, 1]
    assert all(c.choices[0].delta.role is None for c in chunks[2:])
    assert all(c.object == "chat.completion.chunk" for c in chunks)
    assert [c.message.content for c in final.choices] == [SCRIPT, SCRIPT]
    assert [c.finish_reason for c in final.choices] == ["stop", "stop"]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    def ask(stream: bool, **more: Any) -> list[Any]:
        answer: Any = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=10, logprobs=True, stream=stream, **more
        )
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        return [entry for c in choices if c.logprobs for entry in c.logprobs.content]

    whole = ask(False, top_logprobs=3)
    assert [e.token for e in whole[:4]] == [" ", "t", "h", "e"]
    assert whole[8].bytes == [0xC3]
    assert [len(e.top_logprobs) for e in whole] == [3] * 10
    assert whole[0].top_logprobs[0].logprob > whole[0].logprob > LOWEST_LOGPROB
    assert ask(True, top_logprobs=3) == whole
    assert [e.top_logprobs for e in ask(False)] == [[]] * 10
    assert [len(e.top_logprobs) for e in ask(False, top_logprobs=1)] == [1] * 10


def test_extra_fields(client: openai.OpenAI, llm: FakeLLM) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "bad_words": ["x"],
        "return_token_ids": True,
    }
    answer = client.completions.create(
        model="tiny",
        prompt=[5, 6],
        max_tokens=3,
        stop=["!"],
        logit_bias={"7": -100},
        seed=3,
        user="me",
        extra_body=extra,
    )
    ids, params = llm.seen[0]
    assert ids == [5, 6]
    assert (params.top_k, params.min_p, params.ignore_eos, params.min_tokens) == (5, 0.1, True, 2)
    assert params.logit_bias == {7: -100}
    assert (params.stop, params.bad_words, params.seed) == (("!",), ("x",), 3)
    assert answer.choices[0].prompt_token_ids == [5, 6]  # type: ignore[attr-defined]
    assert len(answer.choices[0].token_ids) == 3  # type: ignore[attr-defined]


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 256)  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.APIError, match="internal error"):
        list(client.completions.create(model="tiny", prompt="boom", stream=True))
    with pytest.raises(openai.InternalServerError, match="internal error"):
        client.completions.create(model="tiny", prompt="boom")


def test_hanging_up_ends_the_request(client: openai.OpenAI, llm: FakeLLM) -> None:
    llm.step_seconds = 0.02
    with client.completions.create(model="tiny", prompt="x", max_tokens=200, stream=True) as stream:
        next(iter(stream))
        assert len(llm.running) == 1
    for _ in range(100):
        if not llm.running:
            break
        client.models.list()
    assert not llm.running


async def test_async_client(served: Any, llm: FakeLLM) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    async def one(number: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=number + 1,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(one(i) for i in range(8)))
    assert texts == [SCRIPT[: i + 1] for i in range(8)]
    assert not llm.running
    await client.close()
