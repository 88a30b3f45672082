"""What requests say about sharing memory: salts, priorities, beams, and the blocks as they are."""

import logging
from typing import Any

import openai
import pytest
from fake_engine import SCRIPT, FakeLLM

from pagedjax import BeamSearchParams, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "Hi", "max_tokens": 100},
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100},
}

both = pytest.mark.parametrize("path", BODY)


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


async def ask(served: Any, path: str, **fields: Any) -> Any:
    status, body = await served.post(path, BODY[path] | fields)
    assert status == 200, body
    return body


# ---- salts, priorities, best_of ----


@both
async def test_a_salt_reaches_the_engine_and_not_the_log(
    served_with: Any, llm: FakeLLM, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = await served_with(log_requests=True)
    with caplog.at_level(logging.DEBUG, "pagedjax.server"):
        await ask(served, path, cache_salt="tenant 7", n=2)
        await ask(served, path)
        await ask(served, path, cache_salt="s" * 256)
    assert llm.salts == ["tenant 7", None, "s" * 256]
    assert "asked for" in caplog.text
    assert "tenant 7" not in caplog.text


async def test_every_prompt_has_the_salt(served: Any, llm: FakeLLM) -> None:
    await ask(served, COMPLETIONS, prompt=["a", "b"], cache_salt="x")
    assert llm.salts == ["x", "x"]


@both
async def test_priority(served: Any, llm: FakeLLM, path: str) -> None:
    status, body = await served.post(path, BODY[path] | {"priority": 3})
    assert status == 400
    assert body["error"]["param"] == "priority"
    assert "--scheduling-policy priority" in body["error"]["message"]
    llm.by_priority = True
    await ask(served, path, priority=-3)
    await ask(served, path)
    assert [params.priority for _, params in llm.seen] == [-3, 0]


@both
async def test_best_of(served: Any, llm: FakeLLM, path: str) -> None:
    await ask(served, path, n=2, best_of=5)
    async with served.session.post(
        served.url + path, json=BODY[path] | {"n": 2, "best_of": 2, "stream": True}
    ) as answer:
        assert answer.status == 200
    assert [(params.n, params.best_of) for _, params in llm.seen] == [(2, 5), (2, 2)]
    assert all(isinstance(params, SamplingParams) for _, params in llm.seen)


# ---- beam search ----


@both
@pytest.mark.parametrize("temperature", [None, 0, 1, 1.0])
async def test_beams_by_default(served: Any, llm: FakeLLM, path: str, temperature: float | None) -> None:
    more = {} if temperature is None else {"temperature": temperature}
    body = await ask(served, path, use_beam_search=True, n=3, seed=5, top_k=-1, **more)
    assert llm.seen[0][1] == BeamSearchParams(beam_width=3, max_tokens=100)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in body["choices"]] == [SCRIPT, SCRIPT[1:], SCRIPT[2:]]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == sum(len(SCRIPT[i:].encode()) for i in range(3))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@both
async def test_every_setting_of_a_search(served: Any, llm: FakeLLM, path: str) -> None:
    body = await ask(
        served, path, use_beam_search=True, n=2, best_of=4, length_penalty=0.6, early_stopping="never",
        ignore_eos=True, max_tokens=7, cache_salt="x",
    )  # fmt: skip
    assert llm.seen[0][1] == BeamSearchParams(
        beam_width=4, max_tokens=7, length_penalty=0.6, early_stopping="never", ignore_eos=True
    )
    assert llm.salts == ["x"]
    assert [text_of(choice) for choice in body["choices"]] == [" the ca", "the caf"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 14, "what was searched and not asked for is not counted"
    await ask(served, path, use_beam_search=True, early_stopping=True)
    assert llm.seen[1][1].early_stopping is True


async def test_a_chat_searches_as_far_as_it_fits(served: Any, llm: FakeLLM) -> None:
    await ask(served, CHAT, use_beam_search=True, n=2, max_tokens=None)
    await ask(served, CHAT, use_beam_search=True, n=2, max_tokens=None, max_completion_tokens=5)
    assert [params.max_tokens for _, params in llm.seen] == [None, 5]
    body = BODY[CHAT] | {"use_beam_search": True, "max_tokens": None, "max_completion_tokens": 0}
    status, body = await served.post(CHAT, body)
    assert (status, body["error"]["param"]) == (400, "max_completion_tokens")


async def test_beams_of_several_prompts(served: Any) -> None:
    body = await ask(served, COMPLETIONS, prompt=["a", "b"], use_beam_search=True, n=2, best_of=3, echo=True)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["a" + SCRIPT, "a" + SCRIPT[1:], "b" + SCRIPT, "b" + SCRIPT[1:]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]


def test_the_official_client(url: str, llm: FakeLLM) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    search = {"use_beam_search": True, "length_penalty": 1.5, "early_stopping": True, "cache_salt": "mine"}
    answer = client.completions.create(
        model="tiny", prompt="Hi", n=2, best_of=3, max_tokens=100, temperature=0, extra_body=search
    )
    assert [choice.text for choice in answer.choices] == [SCRIPT, SCRIPT[1:]]
    assert llm.seen[0][1] == BeamSearchParams(beam_width=3, max_tokens=100, length_penalty=1.5, early_stopping=True)
    answer_to = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], n=2, extra_body=search | {"best_of": 4}
    )
    assert [choice.message.content for choice in answer_to.choices] == [SCRIPT, SCRIPT[1:]]
    assert llm.seen[1][1].beam_width == 4
    assert llm.salts == ["mine", "mine"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Hi", extra_body={"use_beam_search": True, "min_p": 0.1})
    assert caught.value.param == "min_p"


def test_streamed_beams_arrive_whole(url: str) -> None:
    """Also where ``best_of`` is not ``n``: nothing is shown that is not final."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    search: dict[str, Any] = {"use_beam_search": True, "best_of": 4}
    *chunks, last = client.completions.create(
        model="tiny",
        prompt="Hi",
        n=2,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=search,
    )
    assert [(c.choices[0].index, c.choices[0].text, c.choices[0].finish_reason) for c in chunks] == [
        (0, SCRIPT, "stop"),
        (1, SCRIPT[1:], "stop"),
    ]
    assert last.usage is not None
    assert last.usage.completion_tokens == len((SCRIPT + SCRIPT[1:]).encode())
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], n=2, stream=True, extra_body=search
    )
    deltas = [(c.choices[0].index, c.choices[0].delta.role, c.choices[0].delta.content) for c in stream]
    assert deltas == [(0, "assistant", ""), (1, "assistant", ""), (0, None, SCRIPT), (1, None, SCRIPT[1:])]


# ---- the blocks ----


async def test_blocks_are_the_engines(served: Any, llm: FakeLLM) -> None:
    llm.snapshot = {
        "num_blocks": 1,
        "block_size": 8,
        "blocks": [
            {
                "id": 0, "state": "free", "ref_count": 0, "filled": 0, "owners": [], "hash_depth": 0, "group": None,
            }
        ],
        "requests": [{"id": "a", "state": "waiting", "tokens": 3, "block_tables": [[None]]}],
    }  # fmt: skip
    status, blocks = await served.get("/debug/blocks")
    assert (status, blocks) == (200, llm.snapshot)
    status, body = await served.post("/debug/blocks", {})
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
