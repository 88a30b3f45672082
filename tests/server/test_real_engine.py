"""The server over the real engine: streams are right, and whoever hangs up holds nothing."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chain_model import ChainModel
from small_engine import FLAGS, TEXT, write_small_model

from pagedjax import AsyncLLM


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> ChainModel:
    return write_small_model(tmp_path_factory.mktemp("served"))


@pytest.fixture
async def engine(chain: ChainModel) -> AsyncLLM:
    return await asyncio.to_thread(AsyncLLM, str(chain.folder), **FLAGS)


@pytest.fixture
async def served(engine: AsyncLLM, served_with: Any) -> Any:
    return await served_with(engine)


async def streamed(served: Any, name: str, **fields: Any) -> str:
    """The text of a streamed completion."""
    body = {"model": name, "temperature": 0, "max_tokens": 80, "stream": True} | fields
    async with served.session.post(served.url + "/v1/completions", json=body) as answer:
        assert answer.status == 200
        events = [line[6:] async for line in answer.content if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_streams_do_not_mix(served: Any, engine: AsyncLLM) -> None:
    """Many at once on eight lanes, each with its own text, and whole where it is not streamed."""
    name = engine.model_name
    prompts = ["<go>", *(f"<n{i}>" for i in range(10))] * 3
    texts = await asyncio.gather(*(streamed(served, name, prompt=prompt) for prompt in prompts))
    assert texts[0] == TEXT
    for prompt, text in zip(prompts, texts, strict=True):
        status, whole = await served.post(
            "/v1/completions", {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 80}
        )
        assert status == 200
        assert whole["choices"][0]["text"] == text
        if prompt != "<go>":
            assert text.startswith(f"{prompt[1:-1]}:0 {prompt[1:-1]}:1 ")
    assert engine._engine.blocks_held == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_blocks(served: Any, engine: AsyncLLM, stream: bool) -> None:
    """Before the next step; the others' tokens are what they would have been."""
    name = engine.model_name
    other = asyncio.create_task(streamed(served, name, prompt="<n1>"))
    body = {"model": name, "prompt": "<loop>", "temperature": 0, "max_tokens": 100, "stream": stream}
    leaving = asyncio.create_task(served.session.post(served.url + "/v1/completions", json=body))
    await until(lambda: engine.num_unfinished == 2)
    if stream:
        answer = await leaving
        await answer.content.readline()
        answer.close()
    else:
        leaving.cancel()
    await until(lambda: engine.num_unfinished < 2)
    assert len(engine._engine._requests) <= 1, "its blocks went with it"
    assert (await other).startswith("n1:0 n1:1 ")
    assert engine._engine.blocks_held == 0
    status, metrics = await served.get("/health")
    assert status == 200, metrics


async def test_the_engine_refuses_by_name(served: Any, engine: AsyncLLM) -> None:
    for fields, param in (
        ({"prompt": [9999]}, "prompt"),
        ({"prompt": "<go>", "max_tokens": 5000}, None),
        ({"prompt": "<go>", "stop_token_ids": [9999]}, "stop_token_ids"),
        ({"prompt": "<go>", "logit_bias": {"9999": 1}}, "logit_bias"),
    ):
        status, answer = await served.post("/v1/completions", {"model": engine.model_name} | fields)
        assert status == 400
        assert answer["error"]["message"]
        if param:
            assert answer["error"]["param"] == param
    assert engine._engine.blocks_held == 0
