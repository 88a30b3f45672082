"""Many clients at once, many one after another, and any request streamed and whole."""

import asyncio
import gc
import http.client
import itertools
import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from chain_model import ChainModel
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_engine import FLAGS, TEXT, write_small_model

from pagedjax import AsyncLLM
from server import ServerConfig, app_runner, create_app


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> ChainModel:
    return write_small_model(tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def engine(chain: ChainModel) -> AsyncLLM:
    return AsyncLLM(str(chain.folder), say=lambda line: None, **FLAGS)


@pytest.fixture(scope="module")
def address(engine: AsyncLLM) -> Iterator[tuple[str, int]]:
    """Of a server in a thread of its own, as its clients are in the tests'."""
    loop = asyncio.new_event_loop()
    runner = app_runner(create_app(engine, ServerConfig(served_model_name="tiny")))

    async def start() -> tuple[str, int]:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        host, port = runner.addresses[0][:2]
        return str(host), int(port)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# ---- at once ----


@pytest.mark.slow
async def test_500_streams_of_which_200_hang_up(address: tuple[str, int], engine: AsyncLLM) -> None:
    """None is lost, none mixed up, and of those who are gone nothing is left before the next step."""
    url = "http://{}:{}/v1/completions".format(*address)
    rng = random.Random(0)
    gone = 0

    async def stays(session: aiohttp.ClientSession, name: str, tokens: int) -> None:
        body = {"model": "tiny", "prompt": f"<{name}>", "temperature": 0, "max_tokens": tokens, "stream": True}
        async with session.post(url, json=body) as answer:
            assert answer.status == 200
            events = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        whole = TEXT if name == "go" else "".join(f"{name}:{index % 7} " for index in range(tokens))
        assert text == whole
        assert events[-1]["choices"][0]["finish_reason"] == ("stop" if name == "go" else "length")

    async def leaves(session: aiohttp.ClientSession, name: str, events: int) -> None:
        nonlocal gone
        body = {"model": "tiny", "prompt": f"<{name}>", "temperature": 0, "max_tokens": 120, "stream": True}
        reading = asyncio.create_task(session.post(url, json=body))
        if events:
            answer = await reading
            for _ in range(events):
                await answer.content.readline()
            answer.close()
        else:  # before there is an answer
            await asyncio.sleep(rng.random())
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        gone += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        calls = [stays(session, f"n{i % 10}" if i % 11 else "go", 80 if not i % 11 else 1 + i % 40) for i in range(300)]
        calls += [leaves(session, f"n{i % 10}", rng.choice([0, 0, 1, 5, 30])) for i in range(200)]
        rng.shuffle(calls)
        await asyncio.gather(*calls)
    assert gone == 200
    await until(lambda: engine.num_unfinished == 0)
    assert engine._engine.blocks_held == 0


# ---- one after another ----


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("requests", "first"),
    [pytest.param(1500, 500, marks=pytest.mark.slow), pytest.param(10_000, 1000, marks=pytest.mark.nightly)],
)
async def test_memory_stays_flat(address: tuple[str, int], engine: AsyncLLM, requests: int, first: int) -> None:
    """Within 5% of what it is after the first ones."""
    url = "http://{}:{}/v1/completions".format(*address)
    before = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:

        async def one(number: int) -> None:
            body: dict[str, Any] = {"model": "tiny", "prompt": f"<n{number % 10}>" * (number % 30 + 1), "max_tokens": 3}
            if number % 2:
                body["stream"] = True
            if number % 3 == 0:
                body |= {"logprobs": 3, "n": 2}
            if number % 7 == 0:
                body["prompt"] = f"so {number}"
            async with session.post(url, json=body) as answer:
                assert answer.status == 200
                await answer.read()

        for batch in itertools.batched(range(requests), 100):
            await asyncio.gather(*map(one, batch))
            if batch[-1] + 1 == first:
                gc.collect()
                before = resident_bytes()
    gc.collect()
    assert resident_bytes() < 1.05 * before
    await until(lambda: engine.num_unfinished == 0)
    assert engine._engine.blocks_held == 0


# ---- streamed and whole ----

prompts = st.one_of(
    st.lists(st.sampled_from(["<go>", "<cat>", "<dice>", "<pqr>", "<note>", "<n3>", "é", "😀", "a"]), min_size=1,
             max_size=4).map("".join),
    st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()),
)  # fmt: skip
options = st.fixed_dictionaries(
    {"seed": st.integers(0, 9), "max_tokens": st.integers(1, 60)},
    optional={
        "temperature": st.sampled_from([0, 0.5, 1.3]),
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(["😀", "ö", "at", "END", ". ", "d!", "l", "b", "pq", "3:1 n3"]), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "return_token_ids": st.booleans(),
    },
)
of_completions = st.fixed_dictionaries(
    {"prompt": st.one_of(prompts, st.lists(prompts, min_size=1, max_size=3))},
    optional={"logprobs": st.integers(0, 3), "echo": st.booleans()},
)
of_chat = st.fixed_dictionaries(
    {"messages": prompts.map(lambda text: [{"role": "user", "content": text}])},
    optional={"logprobs": st.just(True)},
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.one_of(of_completions, of_chat), more=options)
@example(body={"prompt": ["<go>", "<cat>"], "logprobs": 2, "echo": True}, more={"seed": 1, "max_tokens": 60, "n": 2})
def test_streamed_equals_whole(address: tuple[str, int], body: dict[str, Any], more: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = {"model": "tiny"} | body | more
    connection = http.client.HTTPConnection(*address, timeout=60)

    def post(fields: dict[str, Any]) -> str:
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text

    try:
        whole = json.loads(post(asked))
        events = post(asked | {"stream": True, "stream_options": {"include_usage": True}}).split("\n\n")
    finally:
        connection.close()
    assert events[-2:] == ["data: [DONE]", ""]
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert without_cache(last["usage"]) == without_cache(whole["usage"])
    joined: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": ""})
    for chunk in chunks:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            join(joined[choice["index"]], choice)
    assert dict(joined) == {choice["index"]: join({"text": ""}, choice) for choice in whole["choices"]}


def without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    """What was cached the second time may be more."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def join(so_far: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Add a piece, or the whole, of a choice."""
    message = choice.get("delta") or choice.get("message") or {}
    so_far["text"] += choice.get("text") or message.get("content") or ""
    if choice.get("token_ids"):
        so_far["token_ids"] = so_far.get("token_ids", []) + choice["token_ids"]
    for key, values in (choice.get("logprobs") or {}).items():
        if values:
            shown = so_far.setdefault("logprobs", {})
            shown[key] = shown.get(key, []) + values
    for key in ("finish_reason", "stop_reason"):
        if choice.get(key) is not None:
            assert key not in so_far
            so_far[key] = choice[key]
    return so_far
