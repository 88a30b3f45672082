"""Keys, ids, cross-origin answers, the log, and what operators look at."""

import logging
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_engine import FakeLLM

from pagedjax import QueueFull

BODY = {"model": "tiny", "prompt": "a secret", "max_tokens": 2}
PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


async def test_keys(served_with: Any) -> None:
    served = await served_with(api_keys=("one", "two"))
    for header in (
        None,
        "Bearer",
        "Bearer ",
        "Bearer three",
        "Bearer onetwo",
        "Basic one",
        "one",
        "Bearer \xff",
    ):
        headers = {"Authorization": header} if header else {}
        for path in ("/v1/completions", "/tokenize", "/v1/nothing"):
            status, body = await served.post(path, BODY, headers=headers)
            assert status == 401, header
            assert body["error"]["code"] == "invalid_api_key"
    for key in ("one", "two"):
        status, _ = await served.post("/v1/completions", BODY, headers={"Authorization": f"Bearer {key}"})
        assert status == 200
    for path in ("/health", "/version"):
        assert (await served.get(path))[0] == 200
    assert (await served.get("/debug/blocks"))[0] == 401
    assert (await served.get("/debug/blocks", headers={"Authorization": "Bearer one"}))[0] == 200


async def test_request_ids(served: Any) -> None:
    async def ask(path: str, given: str | None) -> str:
        headers = {"X-Request-Id": given} if given else {}
        async with served.session.get(served.url + path, headers=headers) as answer:
            return answer.headers["X-Request-Id"]

    for path in ("/health", "/v1/nothing"):
        assert await ask(path, "job-7:a.b_c") == "job-7:a.b_c"
        for given in (None, "two words", "x" * 129, "<b>", "é"):
            assert re.fullmatch("[0-9a-f]{32}", await ask(path, given))
    assert await ask("/health", None) != await ask("/health", None)


async def test_two_requests_may_share_an_id(served: Any, llm: FakeLLM) -> None:
    headers = {"X-Request-Id": "same"}
    body = BODY | {"prompt": ["a", "b"]}
    for _ in range(2):
        assert (await served.post("/v1/completions", body, headers=headers))[0] == 200
    assert len(llm.seen) == 4


async def test_no_origin_is_allowed_unless_asked(served_with: Any) -> None:
    plain = await served_with()
    async with plain.session.options(plain.url + "/v1/completions", headers=PREFLIGHT) as answer:
        assert answer.status == 405
        assert "Access-Control-Allow-Origin" not in answer.headers
    served = await served_with(cors_origin="https://a.example", api_keys=("one",))
    headers = PREFLIGHT | {"Access-Control-Request-Headers": "authorization,content-type"}
    async with served.session.options(served.url + "/v1/completions", headers=headers) as answer:
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    async with served.session.post(served.url + "/v1/completions", json=BODY) as answer:
        assert answer.status == 401
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"


async def test_logs_hold_no_text(served_with: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="pagedjax")
    served = await served_with(log_requests=True)
    headers = {"X-Request-Id": "mine"}
    await served.post("/v1/completions", BODY | {"temperature": 0.5}, headers=headers)
    await served.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}]})
    await served.post("/v1/completions", BODY | {"prompt": "bug: a secret"}, headers={"X-Request-Id": "faulty"})
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)
    records: list[Any] = caplog.records  # with the fields that the server adds
    done = [r for r in records if getattr(r, "status", None) == 200]
    assert [(r.path, r.method) for r in done] == [
        ("/v1/completions", "POST"),
        ("/v1/chat/completions", "POST"),
    ]
    assert done[0].request_id == "mine"
    asked = [r.parameters for r in records if hasattr(r, "parameters")]
    assert asked[0] == {"model": "tiny", "max_tokens": 2, "temperature": 0.5}
    [fault] = [r for r in records if r.levelno == logging.ERROR]
    assert fault.request_id == "faulty"
    assert fault.exc_info is not None


async def test_own_faults_say_nothing_but_their_id(served: Any) -> None:
    status, body = await served.post("/v1/completions", BODY | {"prompt": "bug"}, headers={"X-Request-Id": "faulty"})
    assert status == 500
    assert body["error"]["type"] == "server_error"
    assert "faulty" in body["error"]["message"]
    assert "secret" not in body["error"]["message"]
    assert (await served.post("/v1/completions", BODY))[0] == 200


async def test_a_full_queue(served: Any, llm: FakeLLM) -> None:
    llm.max_queue = 1
    async with served.session.post(served.url + "/v1/completions", json=BODY | {"prompt": ["a", "b"]}) as answer:
        assert answer.status == 429
        assert int(answer.headers["Retry-After"]) > 0
        assert (await answer.json())["error"]["code"] == "queue_full"
    assert not llm.running
    assert (await served.post("/v1/completions", BODY))[0] == 200


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (2.1, "3"), (1e9, "600")])
async def test_when_to_come_back(
    served: Any, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, seconds: float, header: str
) -> None:
    async def refuse(*args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        raise QueueFull("the queue is full", seconds)
        yield

    monkeypatch.setattr(llm, "generate", refuse)
    for stream in (False, True):
        async with served.session.post(served.url + "/v1/completions", json=BODY | {"stream": stream}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, header)


async def test_health_metrics_version(served_with: Any, llm: FakeLLM) -> None:
    served = await served_with(metrics_prefix="vllm:", served_model_name="shown")
    assert (await served.get("/health"))[0] == 200
    llm.healthy = False
    status, body = await served.get("/health")
    assert status == 503
    assert "no step has ended" in body["error"]["message"]
    assert set((await served.get("/version"))[1]) == {"version"}
    llm.metrics_registry.observe_generation_tokens(7)
    async with served.session.get(served.url + "/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert 'vllm:generation_tokens_total{model_name="shown"} 7.0' in (await answer.text()).splitlines()
    _, models = await served.get("/v1/models")
    assert models["data"][0]["id"] == "shown"
    assert (await served.post("/v1/completions", BODY))[0] == 404
    assert (await served.post("/v1/completions", BODY | {"model": "shown"}))[1]["model"] == "shown"
