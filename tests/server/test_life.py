"""The server's life: it listens while loading, lets running requests end, and says why it cannot start."""

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from fake_engine import SCRIPT, FakeLLM

from pagedjax import UserError
from server import ServerConfig, serve
from server.app import LOADED
from server.errors import ApiError
from server.state import STATE, ServerState

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 30}

PROGRAM = """
import sys, threading, time
sys.path[:0] = {path!r}
from fake_engine import FakeLLM
from pagedjax import UserError
from server import ServerConfig, serve
def load():
    {load}
try:
    sys.exit(serve(ServerConfig(port=0, **{settings!r}), load))
except UserError as error:
    sys.exit(f"pagedjax: {{error}}")
"""


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[str]]]]:
    """Starts a server in a process; gives it with its standard error up to a line that holds ``until``."""
    processes = []

    def start(
        load: str = "return FakeLLM(step_seconds=0.05)", until: str = "ready on", **settings: Any
    ) -> tuple[subprocess.Popen[str], list[str]]:
        program = PROGRAM.format(path=sys.path, load=load, settings=settings)
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if until in line:
                break
        return process, lines

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


async def test_loading(served_with: Any, llm: FakeLLM) -> None:
    go = threading.Event()

    def load() -> FakeLLM:
        assert go.wait(10)
        return llm

    served = await served_with(engine=load)
    for path in ("/health", "/metrics", "/v1/models", "/debug/blocks"):
        status, body = await served.get(path)
        assert status == 503
        assert "loading" in body["error"]["message"]
    async with served.session.post(served.url + "/v1/completions", json=BODY) as answer:
        assert answer.status == 503
        assert "Retry-After" in answer.headers
    go.set()
    await served.app[LOADED]
    assert (await served.get("/health"))[0] == 200
    assert (await served.post("/v1/completions", BODY))[0] == 200


async def test_draining_lets_requests_end(served: Any, llm: FakeLLM) -> None:
    llm.step_seconds = 0.01
    running = asyncio.create_task(served.post("/v1/completions", BODY))
    await llm.begun.wait()
    drain = asyncio.create_task(served.app[STATE].drain())
    await asyncio.sleep(0)
    status, body = await served.post("/v1/completions", BODY)
    assert status == 503
    assert "shutting down" in body["error"]["message"]
    assert (await served.get("/health"))[0] == 503
    assert (await served.get("/debug/blocks"))[0] == 200, "whoever waits for the end may look at what runs"
    status, body = await running
    assert status == 200
    assert body["usage"]["completion_tokens"] == 30
    await drain


async def test_when_a_server_that_drains_is_gone(served_with: Any, llm: FakeLLM) -> None:
    llm.step_seconds = 0.01
    served = await served_with(shutdown_timeout=25)
    running = asyncio.create_task(served.post("/v1/completions", BODY))
    await llm.begun.wait()
    drain = asyncio.create_task(served.app[STATE].drain())
    await asyncio.sleep(0)
    async with served.session.post(served.url + "/v1/completions", json=BODY) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "25")
    await running
    await drain


@pytest.mark.parametrize(("own", "servers", "limit"), [(0.05, None, 0.05), (0.05, 5.0, 0.05), (9.0, 0.06, 0.06)])
async def test_a_requests_own_time(
    served_with: Any, llm: FakeLLM, own: float, servers: float | None, limit: float
) -> None:
    llm.step_seconds = 0.02
    served = await served_with(request_timeout=servers)
    status, body = await served.post("/v1/completions", BODY | {"timeout": own})
    assert (status, body["error"]["code"]) == (408, "request_timeout")
    assert body["error"]["message"] == f"the request took longer than {limit:g} s"
    async with served.session.post(
        served.url + "/v1/completions", json=BODY | {"timeout": own, "stream": True}
    ) as sent:
        assert "request_timeout" in (await sent.text()).split("\n\n")[-2]
    assert not llm.running
    llm.step_seconds = 0
    assert (await served.post("/v1/completions", BODY | {"timeout": 30}))[0] == 200


async def test_a_client_that_does_not_read(served: Any, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hung up on; until then it holds up nobody."""
    monkeypatch.setattr("server.sse.SLOW_READER_SECONDS", 0.3)
    llm.script, llm.max_model_len = "x" * 60_000, 70_000
    host, port = served.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        body = json.dumps(BODY | {"stream": True, "max_tokens": 60_000, "logprobs": 5}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        await llm.begun.wait()
        async with asyncio.timeout(30):
            while llm.running:
                await asyncio.sleep(0.01)
                assert (await served.get("/health"))[0] == 200
    status, _ = await served.post("/v1/completions", BODY)
    assert status == 200


async def test_draining_ends_what_takes_too_long(served_with: Any, llm: FakeLLM) -> None:
    llm.step_seconds = 0.05
    served = await served_with(shutdown_timeout=0.1)
    whole = asyncio.create_task(served.post("/v1/completions", BODY))
    async with served.session.post(served.url + "/v1/completions", json=BODY | {"stream": True}) as stream:
        await served.app[STATE].drain()
        last = (await stream.text()).split("\n\n")[-2]
    assert "shut down before" in json.loads(last.removeprefix("data: "))["error"]["message"]
    status, body = await whole
    assert status == 503
    assert "shut down before" in body["error"]["message"]
    assert not llm.running


async def test_draining_while_a_request_that_took_too_long_still_ends() -> None:
    state = ServerState(ServerConfig(request_timeout=0.02, shutdown_timeout=0.05))
    state.ready(cast(Any, FakeLLM()))

    async def slow() -> None:
        async with state.generation(None):
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0.2)  # longer than the server waits

    request = asyncio.create_task(slow())
    await asyncio.sleep(0)
    await state.drain()
    assert not request.done()
    with pytest.raises(ApiError):
        await request


async def test_request_timeout(served_with: Any, llm: FakeLLM) -> None:
    llm.step_seconds = 0.05
    served = await served_with(request_timeout=0.1)
    status, body = await served.post("/v1/completions", BODY)
    assert status == 408
    assert body["error"]["code"] == "request_timeout"
    assert not llm.running


@pytest.mark.parametrize(
    "more", [{}, {"stream": True}, {"prompt": ["a", "b", "c"]}, {"prompt": ["a", "b"], "stream": True}]
)
async def test_hanging_up_ends_the_request(served: Any, llm: FakeLLM, more: dict[str, Any]) -> None:
    llm.step_seconds = 0.02
    request = asyncio.create_task(served.post("/v1/completions", BODY | more))
    await llm.begun.wait()
    request.cancel()
    start = time.monotonic()
    while llm.running:
        await asyncio.sleep(0.005)
        assert time.monotonic() < start + 0.3, "the request outlived its client"


async def test_many_clients(served: Any, llm: FakeLLM) -> None:
    llm.max_queue = 1000

    async def one(number: int) -> None:
        body: dict[str, Any] = BODY | {"max_tokens": 1 + number % 35, "prompt": f"{number}", "stream": True}
        async with served.session.post(served.url + "/v1/completions", json=body) as answer:
            if number % 3 == 0:
                await answer.content.readany()
                answer.close()  # hangs up
                return
            parts = (await answer.read()).decode().split("\n\n")[:-2]
        text = "".join(json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts)
        assert text == SCRIPT.encode()[: body["max_tokens"]].decode("utf-8", "replace")

    await asyncio.gather(*(one(i) for i in range(60)))
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not llm.running:
            break
    assert not llm.running


def test_a_process_from_start_to_end(started: Any) -> None:
    process, lines = started()
    url = lines[-1].strip().removeprefix("pagedjax: ready on ")
    assert url.startswith("http://127.0.0.1:")

    async def talk() -> tuple[str, int]:
        body = BODY | {"stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json=body) as stream,
        ):
            await stream.content.readany()
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            async with session.get(url + "/health") as health:
                status = health.status
            return (await stream.text()), status

    text, status = asyncio.run(talk())
    assert text.endswith("data: [DONE]\n\n")
    assert status == 503
    assert process.wait(5) == 0


def test_a_signal_while_loading(started: Any) -> None:
    process, _ = started(load="sys.stderr.write('loading\\n'); time.sleep(60)", until="loading")
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 0


def test_an_engine_that_never_ends(started: Any) -> None:
    load = "threading.Thread(target=time.sleep, args=(60,)).start(); return FakeLLM(hangs=True)"
    process, _ = started(load=load)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert process.stderr is not None
    assert "did not end" in process.stderr.read()


def test_a_second_signal(started: Any) -> None:
    process, lines = started(load="return FakeLLM(step_seconds=5)")
    url = lines[-1].strip().removeprefix("pagedjax: ready on ")

    async def talk() -> None:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(url + "/v1/completions", json=BODY))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientError):
                await request

    asyncio.run(talk())
    assert process.wait(5) == 128 + signal.SIGTERM


def test_a_model_that_cannot_be_loaded(started: Any) -> None:
    process, lines = started(load="raise UserError('no such model')")
    assert process.wait(5) == 1
    assert lines == ["pagedjax: no such model\n"]


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is taken"):
            serve(ServerConfig(port=port), cast(Any, FakeLLM))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"host": "no.such.host.invalid"}, "--host"),
        ({"host": "192.0.2.1"}, "--host"),
        ({"ssl_certfile": "/nowhere", "ssl_keyfile": "/nowhere"}, "--ssl-certfile"),
        ({"ssl_certfile": "/nowhere"}, "--ssl-keyfile"),
        ({"port": 70000}, "--port"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix"),
        ({"log_level": "loud"}, "--log-level"),
        ({"log_format": "xml"}, "--log-format"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout"),
        ({"hang_timeout": 0}, "--hang-timeout"),
        ({"request_timeout": 0}, "--request-timeout"),
        ({"request_timeout": float("nan")}, "--request-timeout"),
        ({"request_timeout": float("inf")}, "--request-timeout"),
        ({"hang_timeout": float("nan")}, "--hang-timeout"),
        ({"shutdown_timeout": float("nan")}, "--shutdown-timeout"),
    ],
    ids=str,
)
def test_wrong_settings(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        serve(ServerConfig(**{"port": 0} | settings), cast(Any, FakeLLM))


def test_tls_and_json_logs(started: Any, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    process, lines = started(ssl_certfile=str(cert), ssl_keyfile=str(key), log_format="json", host="127.0.0.1")
    url = lines[-1].strip().removeprefix("pagedjax: ready on ")
    assert url.startswith("https://")
    context = ssl.create_default_context(cafile=str(cert))

    async def talk() -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/v1/completions", json=BODY | {"max_tokens": 1}, ssl=context) as answer,
        ):
            return answer.status

    assert asyncio.run(talk()) == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert process.stderr is not None
    logged = [json.loads(line) for line in process.stderr]
    assert logged[0]["path"] == "/v1/completions"
    assert logged[0]["status"] == 200
    assert logged[0]["level"] == "info"
