"""The server over the real engine: streams are right, and whoever hangs up holds nothing."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chain_model import ChainModel
from small_engine import FLAGS, TEXT, write_small_model

from pagedjax import AsyncLLM, RequestOutput


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
        ({"prompt": "<go>", "priority": 1}, "priority"),
        ({"prompt": "<go>", "use_beam_search": True, "best_of": 9}, "best_of"),
        ({"prompt": "<go>", "use_beam_search": True, "n": 9}, "n"),
    ):
        status, answer = await served.post("/v1/completions", {"model": engine.model_name} | fields)
        assert status == 400
        assert answer["error"]["message"]
        if param:
            assert answer["error"]["param"] == param
    assert engine._engine.blocks_held == 0


async def test_cached_tokens(served: Any, engine: AsyncLLM) -> None:
    """Of 20 prompt tokens two full blocks of eight; each salt has a cache of its own."""

    async def cached(**fields: Any) -> int:
        body = {"model": engine.model_name, "prompt": "<n1>" * 20, "temperature": 0, "max_tokens": 4} | fields
        status, answer = await served.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["text"].startswith("n1:0 ")
        assert answer["usage"]["prompt_tokens"] == 20 * (2 if isinstance(body["prompt"], list) else 1)
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [await cached() for _ in range(2)] == [0, 16]
    assert [await cached(cache_salt="a") for _ in range(2)] == [0, 16]
    assert await cached(cache_salt="b") == 0
    assert await cached(prompt_logprobs=0) == 0, "every token's logits are wanted"
    assert await cached(prompt=["<n1>" * 20] * 2) == 32
    body = {"model": engine.model_name, "prompt": "<n1>" * 20, "max_tokens": 2, "temperature": 0, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    async with served.session.post(served.url + "/v1/completions", json=body | options) as answer:
        events = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_beams_come_best_first(served: Any, engine: AsyncLLM, chain: ChainModel) -> None:
    """The scores are those of a search written down here; the chain has ties, so that tokens may differ."""
    width, length = 5, 6
    body = {"model": engine.model_name, "prompt": "<pqr>", "max_tokens": length, "return_token_ids": True}
    status, answer = await served.post("/v1/completions", body | {"use_beam_search": True, "n": 3, "best_of": width})
    assert status == 200, answer

    def logprob(before: int, after: int) -> float:
        return float(chain.log_probs[before, after])

    start, faces = chain.id("<pqr>"), [chain.id(face) for face in "pqr"]
    beams = [(0.0, start)]
    for _ in range(length):
        longer = [(score + logprob(last, face), face) for score, last in beams for face in faces]
        beams = sorted(longer, reverse=True)[:width]
    found = []
    for index, choice in enumerate(answer["choices"]):
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
        ids = choice["token_ids"]
        assert choice["text"] == "".join("pqr"[faces.index(i)] for i in ids)
        found.append(sum(logprob(before, after) for before, after in zip([start, *ids], ids, strict=False)))
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    assert found == pytest.approx([score for score, _ in beams[:3]], abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 3 * length
    assert engine._engine.blocks_held == 0


async def test_a_chat_searches_as_far_as_it_fits(served: Any, engine: AsyncLLM) -> None:
    body = {"model": engine.model_name, "messages": [{"role": "user", "content": "Hi"}], "use_beam_search": True}
    for more in ({}, {"best_of": 3, "max_tokens": 8, "early_stopping": True}):
        status, answer = await served.post("/v1/chat/completions", body | more)
        assert status == 200, answer
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    status, answer = await served.post("/v1/chat/completions", body | {"best_of": 3})
    assert (status, answer["error"]["param"]) == (400, "best_of"), "three beams of the greatest length do not fit"


async def test_blocks_while_streams_run(served: Any, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams share their prompts' full blocks; both hold blocks of their own besides."""
    original = engine._engine.step

    def step() -> list[RequestOutput]:
        time.sleep(0.005)
        return original()

    monkeypatch.setattr(engine._engine, "step", step)
    prompt, name = "<n1>" * 17, engine.model_name
    tasks = [asyncio.create_task(streamed(served, name, prompt=prompt, max_tokens=60)) for _ in range(2)]
    shown: dict[str, Any] = {"blocks": []}
    async with asyncio.timeout(10):
        while not any(block["ref_count"] > 1 for block in shown["blocks"]):
            status, shown = await served.get("/debug/blocks")
            assert status == 200
    assert shown.keys() == {"num_blocks", "block_size", "blocks", "requests"}
    assert (shown["num_blocks"], shown["block_size"], len(shown["blocks"])) == (24, 8, 24)
    first, second = shown["requests"]
    assert first.keys() == {"id", "state", "tokens", "block_tables"}
    assert [first["state"], second["state"]] == ["running", "running"]
    assert min(first["tokens"], second["tokens"]) > 17
    ids = [first["id"], second["id"]]
    assert all(request_id.startswith("cmpl-") for request_id in ids)
    table, other = first["block_tables"][0], second["block_tables"][0]
    assert table[:2] == other[:2]
    assert not {*table[2:]} & {*other[2:]}
    for entry in shown["blocks"]:
        assert entry.keys() == {"id", "state", "ref_count", "filled", "owners", "hash_depth", "group"}
        number, holders = entry["id"], [i for i, held in zip(ids, (table, other), strict=True) if entry["id"] in held]
        assert (entry["owners"], entry["ref_count"]) == (holders, len(holders))
        assert (entry["state"] == "referenced") == bool(holders)
        if number in table[:2]:
            assert (entry["filled"], entry["hash_depth"], entry["group"]) == (8, table.index(number) + 1, 0)
        if entry["state"] == "free":
            assert (entry["filled"], entry["hash_depth"], entry["group"]) == (0, 0, None)
    texts = await asyncio.gather(*tasks)
    assert texts[0] == texts[1]
    status, shown = await served.get("/debug/blocks")
    assert {block["state"] for block in shown["blocks"]} == {"cached", "free"}
    assert shown["requests"] == []
