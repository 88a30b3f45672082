"""`bench serve`: what it sends when, what it measures of servers whose delays are known, and what it says of faults."""

import asyncio
import dataclasses
import itertools
import json
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
from aiohttp import web
from chain_model import write_chain_model
from fake_engine import FakeLLM

from pagedjax import LLM, SamplingParams
from pagedjax.bench_client import Answer
from pagedjax.bench_report import Run, numbers_of, table
from pagedjax.bench_serve import WORDS, ServeBench, bench_serve
from pagedjax.bench_workload import arrival_times, random_prompts, share_as_traced
from pagedjax.cli import main
from pagedjax.config import UserError
from pagedjax.tokenizer import Tokenizer
from pagedjax.traces import TraceRequest
from server import ServerConfig, app_runner, create_app

ROOT = Path(__file__).parents[1]
SLACK = 60.0  # milliseconds by which a busy machine may delay a median


@dataclass
class ScriptedServer:
    """An OpenAI-compatible server that is not pagedjax: its delays and its faults are given.

    A request's number counts from 0; the one before the benchmark, which nobody counts, is -1.
    """

    first_delay: Callable[[int], float] = lambda number: 0.0
    gap: float = 0.0
    fault: Callable[[int], str | None] = lambda number: None
    usage: bool = True
    done: bool = True
    line_end: str = "\n"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)
    running: int = 0
    peak: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append(time.perf_counter())
        self.written.append([])
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._answer(request, len(self.bodies) - 2)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, number: int) -> web.StreamResponse:
        body = self.bodies[number + 1]
        fault = None if number < 0 else self.fault(number)
        if fault and fault.isdigit():
            error = {"message": f"no\nroom for {number}", "type": "x", "param": None, "code": None}
            return web.json_response({"error": error}, status=int(fault))
        if fault == "whole":
            return web.json_response({"choices": [{"text": "all at once"}]})
        await asyncio.sleep(self.first_delay(number) if number >= 0 else 0.0)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(response, ": a comment")
        chat = request.path.endswith("/chat/completions")
        if chat:
            await self._event(response, choices=[{"delta": {"role": "assistant", "content": ""}}])
        total, written = body["max_tokens"], self.written[number + 1]
        for count in range(total):
            await asyncio.sleep(self.gap if count else 0.0)
            if count == 2 and fault:
                await self._break(request, response, fault)
                return response
            written.append(time.perf_counter())
            text = {"delta": {"content": "x"}} if chat else {"text": "x"}
            await self._event(response, choices=[text | {"index": 0, "finish_reason": None}], usage=None)
        await self._event(response, choices=[{"delta": {}} if chat else {"text": ""} | {"finish_reason": "length"}])
        if self.usage:
            size = len(body["prompt"]) if not chat else 9
            await self._event(response, choices=[], usage={"prompt_tokens": size, "completion_tokens": total})
        if self.done:
            await self._send(response, "data: [DONE]")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, fault: str) -> None:
        if fault == "error":
            await self._event(response, error={"message": "the device broke"})
        elif fault == "malformed":
            await self._send(response, 'data: {"choices": [')
        elif fault == "hangs":
            await asyncio.sleep(5)
        elif fault == "torn":
            assert request.transport is not None
            request.transport.abort()

    async def _event(self, response: web.StreamResponse, **fields: Any) -> None:
        await self._send(response, "data: " + json.dumps(fields))

    async def _send(self, response: web.StreamResponse, line: str) -> None:
        await response.write((line + 2 * self.line_end).encode())


def in_a_thread(runner: Callable[[], web.AppRunner]) -> Iterator[str]:
    """Run a server beside the test; its address."""
    loop = asyncio.new_event_loop()
    running: list[web.AppRunner] = []

    async def start() -> str:
        running.append(runner())
        await running[0].setup()
        await web.TCPSite(running[0], "127.0.0.1", 0).start()
        host, port = running[0].addresses[0][:2]
        return f"http://{host}:{port}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(start(), loop).result(5)
    asyncio.run_coroutine_threadsafe(running[0].cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def script() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def url(script: ScriptedServer) -> Iterator[str]:
    def runner() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", script.answer)
        app.router.add_post("/v1/chat/completions", script.answer)
        return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    yield from in_a_thread(runner)


@pytest.fixture
def run(url: str) -> Callable[..., dict[str, Any]]:
    """Run one rate against the scripted server: its numbers."""

    def one(**settings: Any) -> dict[str, Any]:
        defaults: dict[str, Any] = {"input_len": 7, "output_len": 4, "vocab_size": 50}
        [numbers] = bench_serve(ServeBench(base_url=url, model="m", **(defaults | settings)))["runs"]
        return cast(dict[str, Any], numbers)

    return one


# ---- what is measured ----


@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_latencies_of_a_server_with_known_delays(
    script: ScriptedServer, run: Callable[..., dict[str, Any]], line_end: str
) -> None:
    script.first_delay, script.gap, script.line_end = lambda number: 0.08, 0.05, line_end
    numbers = run(num_prompts=9, output_len=5, goodput=("ttft:5000", "tpot:5000", "e2el:50000"))
    # Never less than the script says, and no more than a moment beside what the server saw itself, late as it may be.
    arrived, written = np.array(script.arrivals[1:]), np.array(script.written[1:])
    seen = {"ttft_ms": written[:, 0] - arrived, "e2el_ms": written[:, -1] - arrived, "itl_ms": np.diff(written)}
    seen["tpot_ms"] = (written[:, -1] - written[:, 0]) / 4
    for name, least in {"ttft_ms": 80, "tpot_ms": 50, "itl_ms": 50, "e2el_ms": 80 + 4 * 50}.items():
        expected = 1000 * float(np.median(seen[name]))
        assert expected > least - 1
        assert expected - 10 < numbers[name]["median"] < expected + SLACK, name
        assert numbers[name]["median"] <= numbers[name]["p90"] <= numbers[name]["p99"]
    assert (numbers["completed"], numbers["failed"], numbers["without_usage"]) == (9, 0, 0)
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (9 * 7, 9 * 5)
    assert numbers["output_tokens_per_s"] == pytest.approx(45 / numbers["elapsed_s"], rel=1e-3)
    assert numbers["peak_concurrent_requests"] == script.peak == 9
    assert numbers["good"] == 9


def test_goodput(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.first_delay = lambda number: 0.4 if number % 3 == 0 else 0.0
    numbers = run(num_prompts=9, goodput=("ttft:350",))
    assert numbers["good"] == 6
    assert numbers["goodput_requests_per_s"] == pytest.approx(6 / numbers["elapsed_s"], rel=1e-2)
    script.gap = 0.06
    assert run(num_prompts=4, goodput=("ttft:5000", "tpot:40"))["good"] == 0


def test_a_failed_request_is_not_a_good_one(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.fault = lambda number: "500" if number == 1 else None
    numbers = run(num_prompts=3, goodput=("ttft:5000",))
    assert (numbers["good"], numbers["failed"]) == (2, 1)


def test_a_server_without_usage(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.usage = False
    numbers = run(num_prompts=3)
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (3 * 7, 3 * 4)
    assert numbers["without_usage"] == 3
    assert "3 answers came without usage: prompt tokens as sent, output tokens counted by chunks" in table(numbers)


def test_a_stream_without_its_last_line(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.done = False
    assert run(num_prompts=2)["failed"] == 0


def test_the_role_is_no_first_token(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.gap = 0.05
    numbers = run(num_prompts=3, endpoint="chat", vocab_size=None, output_len=3)
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (27, 9)
    assert numbers["itl_ms"]["median"] > 45
    [message] = script.bodies[1]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 7
    assert set(message["content"].split()) <= set(WORDS)


def test_several_tokens_in_a_chunk() -> None:
    answer = Answer(sent=10.0, chunks=[10.5, 11.0], ended=11.0, prompt_tokens=3, output_tokens=5, has_usage=True)
    late = Answer(sent=11.0, chunks=[13.0], ended=13.0, prompt_tokens=3, output_tokens=1, has_usage=True)
    run = Run(answers=[answer, late], elapsed=4.0, send_delays=[0.0, 0.2], request_rate=2.0, max_concurrency=None)
    numbers = numbers_of(run, {"tpot": 0.2})
    assert numbers["ttft_ms"]["mean"] == 1250.0
    assert numbers["itl_ms"]["mean"] == 500.0
    assert numbers["tpot_ms"] == {"mean": 125.0, "median": 125.0, "p90": 125.0, "p99": 125.0}
    assert numbers["e2el_ms"]["mean"] == 1500.0
    assert numbers["output_tokens_per_s"] == 1.5
    assert numbers["good"] == 2  # one token has no time per further token that could be too long
    assert numbers["peak_concurrent_requests"] == 1
    assert "this client is too slow for the rate" in table(numbers)


def test_nothing_came_back() -> None:
    failed = Answer(sent=1.0, ended=1.5, failure="timeout")
    run = Run(answers=[failed], elapsed=1.0, send_delays=[0.0], request_rate=np.inf, max_concurrency=1)
    numbers = numbers_of(run, {})
    assert numbers["ttft_ms"] is None
    text = table(numbers)
    assert re.search(r"^P99 TTFT \(ms\): +n/a$", text, re.MULTILINE)
    assert text.splitlines()[-1] == "1 failed: timeout"


# ---- failures ----


def test_failures_are_counted_by_kind(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    faults = ["429", "429", "500", "whole", "error", "malformed", "hangs", "ends", "torn", None]
    script.fault = lambda number: faults[number]
    numbers = run(num_prompts=10, timeout=2.0)
    assert {kind: failure["count"] for kind, failure in numbers["failures"].items()} == {
        "HTTP 429": 2,
        "HTTP 500": 1,
        "not a stream": 1,
        "error in the stream": 1,
        "malformed event": 1,
        "timeout": 1,
        "cut off": 2,  # one ends in good order, the other one's connection breaks
    }
    assert (numbers["completed"], numbers["failed"], numbers["output_tokens"]) == (1, 9, 4)
    lines = table(numbers).splitlines()
    assert "1 failed: HTTP 500: no room for 2" in lines
    assert "1 failed: error in the stream: the device broke" in lines


def test_a_server_that_goes_away(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.fault = lambda number: "torn"
    numbers = run(num_prompts=3, request_rate=(50.0,))
    assert numbers["failures"]["cut off"]["count"] == 3
    assert numbers["itl_ms"] is None


# ---- what is sent ----


def test_fields_of_other_servers_only_where_asked_for(
    script: ScriptedServer, run: Callable[..., dict[str, Any]]
) -> None:
    plain = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    run(num_prompts=2)
    assert all(set(body) == plain for body in script.bodies)
    assert all(len(body["prompt"]) == 7 and max(body["prompt"]) < 50 for body in script.bodies[1:])
    assert all("Authorization" not in headers for headers in script.headers)
    script.bodies.clear()
    run(num_prompts=1, ignore_eos=True, api_key="secret", extra_body='{"temperature": 0.5, "stream_options": null}')
    assert set(script.bodies[-1]) == plain - {"stream_options"} | {"ignore_eos"}
    assert (script.bodies[-1]["temperature"], script.bodies[-1]["ignore_eos"]) == (0.5, True)
    assert script.headers[-1]["Authorization"] == "Bearer secret"


def test_each_rate_has_prompts_of_its_own(script: ScriptedServer, url: str) -> None:
    config = ServeBench(
        base_url=url + "/v1/",
        model="m",
        num_prompts=3,
        input_len=9,
        output_len=1,
        shared_prefix_len=4,
        request_rate=(200.0, np.inf),
    )
    report = bench_serve(config)
    assert [numbers["request_rate"] for numbers in report["runs"]] == [200.0, "inf"]
    prompts = [body["prompt"].split() for body in script.bodies if len(body["prompt"].split()) == 9]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    beginnings = [tuple(prompt[:4]) for prompt in prompts]
    assert len(set(beginnings[:3])) == len(set(beginnings[3:])) == 1
    assert beginnings[0] != beginnings[3]
    first, script.bodies[:] = list(script.bodies), []
    bench_serve(config)
    assert sorted(map(str, first)) == sorted(map(str, script.bodies))  # by the seed


def test_a_tokenizers_ids(script: ScriptedServer, run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    folder = write_chain_model(tmp_path, {"a": "b"}, max_model_len=64).folder
    tokenizer = Tokenizer.load(folder)
    run(num_prompts=3, input_len=5000, vocab_size=None, tokenizer=str(folder))
    sent = {token_id for body in script.bodies for token_id in body["prompt"]}
    assert tokenizer.special_token_ids
    assert sent == set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids


def test_max_concurrency(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.gap = 0.1
    numbers = run(num_prompts=7, max_concurrency=2)
    assert script.peak == 2
    assert numbers["peak_concurrent_requests"] == 2
    assert numbers["ttft_ms"]["median"] < 200  # waiting here is not waiting there


# ---- when it is sent ----


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_pauses_have_the_mean_and_the_spread_they_should(burstiness: float) -> None:
    arrivals = arrival_times(40_000, rate=8.0, burstiness=burstiness, seed=3)
    pauses = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert pauses.min() >= 0
    assert pauses.mean() == pytest.approx(1 / 8, rel=0.05)
    assert pauses.std() == pytest.approx(1 / 8 / burstiness**0.5, rel=0.05)
    if burstiness == 1:  # exponential, so that arrivals per second follow Poisson's law
        counts = np.bincount(np.floor(arrivals).astype(int))[:-1]
        assert counts.mean() == pytest.approx(8, rel=0.05)
        assert counts.var() == pytest.approx(8, rel=0.1)
    assert arrivals == arrival_times(40_000, rate=8.0, burstiness=burstiness, seed=3)


def test_all_at_once() -> None:
    assert arrival_times(3, rate=np.inf) == [0.0, 0.0, 0.0]


def since_first(script: ScriptedServer) -> np.ndarray[Any, Any]:
    """When requests came, in seconds after the first one that counts."""
    return np.array(script.arrivals[1:]) - script.arrivals[1]


def test_requests_are_sent_when_they_should(script: ScriptedServer, run: Callable[..., dict[str, Any]]) -> None:
    script.gap = 0.01
    numbers = run(num_prompts=30, request_rate=(20.0,), seed=5)
    expected = arrival_times(30, 20.0, seed=(5, 0, 1))
    late = since_first(script) - expected  # all alike where the first, which opens a connection, was
    assert np.median(np.abs(late - np.median(late))) < SLACK / 1000
    assert numbers["send_delay_ms"]["median"] < SLACK


TRACE = "".join(
    json.dumps({"timestamp": at, "input_length": 6, "output_length": out, "hash_ids": ids}) + "\n"
    for at, out, ids in [(1000, 2, [4, 5]), (1800, 1, [7, 5]), (1600, 3, [4, 6])]  # in no order
)


@pytest.mark.parametrize(("rates", "expected"), [((), [0.0, 0.6, 0.8]), ((5.0,), [0.0, 0.3, 0.4])])
def test_a_traces_arrivals(
    script: ScriptedServer,
    run: Callable[..., dict[str, Any]],
    tmp_path: Path,
    rates: tuple[float, ...],
    expected: list[float],
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(TRACE)
    numbers = run(trace=trace, num_prompts=3, request_rate=rates)
    assert since_first(script) == pytest.approx(expected, abs=0.15)
    assert [body["max_tokens"] for body in script.bodies[1:]] == [2, 3, 1]
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (18, 6)
    # An id of the trace stands for 512 tokens, more than these prompts have.
    first, second, third = (body["prompt"] for body in script.bodies[1:])
    assert first == second != third


def test_equal_ids_are_equal_tokens() -> None:
    requests = [
        TraceRequest(0.0, 8, 1, (4, 5), 2.5),
        TraceRequest(0.0, 8, 1, (4, 6), 2.5),
        TraceRequest(0.0, 4, 1, (4, 5), 2.5),
    ]
    prompts = [[100 + i] * request.prompt_tokens for i, request in enumerate(requests)]
    first, second, third = share_as_traced(prompts, requests, vocab_size=90, seed=1)
    assert first[:2] == second[:2]
    assert first[2:5] != second[2:5]
    assert first[:4] == third
    assert (first[5:], second[5:]) == ([100] * 3, [101] * 3)  # no id stands for these
    assert max(first[:5]) < 90


# ---- pagedjax's own server ----


@pytest.fixture
def ours() -> Iterator[str]:
    engine = FakeLLM(step_seconds=0.01)
    yield from in_a_thread(lambda: app_runner(create_app(cast(Any, engine), ServerConfig(api_keys=("k",)))))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_our_own_server(ours: str, endpoint: str) -> None:
    config = ServeBench(
        base_url=ours, model="tiny", endpoint=endpoint, num_prompts=5, input_len=20, output_len=8, api_key="k"
    )
    [numbers] = bench_serve(config)["runs"]
    assert (numbers["completed"], numbers["output_tokens"], numbers["without_usage"]) == (5, 40, 0)
    assert numbers["tpot_ms"]["median"] > 9
    assert 9 < numbers["ttft_ms"]["median"] < numbers["e2el_ms"]["median"] - 60


BIG_ENOUGH: dict[str, Any] = {  # 100 million parameters: a step takes some ten milliseconds or more on any two cores
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_dummy_model(folder: Path) -> None:
    """A model without weights whose tokens all have a text, so that each of them is an event."""
    (folder / "config.json").write_text(json.dumps(BIG_ENOUGH))
    words = map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    vocabulary = {f" {word}": i for i, word in enumerate(itertools.islice(words, BIG_ENOUGH["vocab_size"]))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" aaaa"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))


@contextmanager
def our_server(*flags: str) -> Iterator[str]:
    """`pagedjax serve` in a process of its own; its address."""
    command = [sys.executable, "-m", "pagedjax.cli", "serve", *flags, "--port", "0", "--served-model-name", "m"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            ready = next(line for line in process.stderr if line.startswith("pagedjax: ready on "))
            yield ready.split()[-1]
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()


@pytest.mark.nightly
def test_streaming_to_32_clients_costs_little(tmp_path: Path, step_cache: Path) -> None:
    """At most a tenth of what ``LLM.generate`` does with the same requests, the clients' own work counted in.

    Rounds alternate, since what else a machine does makes both slower, and the median of their ratios counts.
    """
    write_dummy_model(tmp_path)
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "kv_cache_memory": "128MiB", "load_format": "dummy"}
    flags = [part for name, value in sizes.items() for part in ("--" + name.replace("_", "-"), str(value))]
    streamed, whole = list[float](), list[float]()
    with our_server(str(tmp_path), *flags) as address:
        llm = LLM(str(tmp_path), **sizes)
        for seed in range(5):
            config = ServeBench(
                base_url=address, model="m", num_prompts=32, input_len=16, output_len=48, vocab_size=32000, seed=seed
            )
            [numbers] = bench_serve(dataclasses.replace(config, ignore_eos=True))["runs"]
            assert (numbers["failed"], numbers["output_tokens"]) == (0, 32 * 48)
            assert numbers["itl_ms"] is not None, "tokens came one by one"
            streamed.append(numbers["output_tokens_per_s"])
            prompts = random_prompts(config.lengths(), 32000, seed=(seed, 0))
            began = time.perf_counter()
            llm.generate(prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=48), use_tqdm=False)
            whole.append(32 * 48 / (time.perf_counter() - began))
    print(f"output tokens/s streamed {streamed}, generated {whole}")
    assert np.median(np.array(streamed) / np.array(whole)) > 0.9


# ---- the command ----


def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "numbers.json", tmp_path / "plot.png"]
    command = ["bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", "4", "--output-len", "3"]
    command += ["--request-rate", "100", "1e3", "inf", "--goodput", "ttft:900", "tpot:900"]
    assert main([*command, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    out, err = capsys.readouterr()
    assert out.count(" Serving Benchmark Result ") == 3
    rows = dict(re.findall(r"^(\S.*\S):\s+(\S+)$", out, re.MULTILINE))
    names = "Successful requests|Failed requests|Request rate configured (RPS)|Benchmark duration (s)"
    names += "|Total input tokens|Total generated tokens|Request throughput (req/s)|Request goodput (req/s)"
    names += "|Output token throughput (tok/s)|Peak concurrent requests|Total token throughput (tok/s)"
    names += "".join(
        f"|{statistic} {name} (ms)"
        for name in ("TTFT", "TPOT", "ITL", "E2EL")
        for statistic in ("Mean", "Median", "P99")
    )
    assert list(rows) == names.split("|")
    assert (rows["Successful requests"], rows["Total generated tokens"]) == ("4", "12")
    assert "4/4" in err  # the progress bar
    report = json.loads(files[0].read_text())
    assert [numbers["request_rate"] for numbers in report["runs"]] == [100.0, 1000.0, "inf"]
    assert "version" in report
    assert size_of_png(files[1].read_bytes()) == (960, 676)


def size_of_png(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG whose checksums and pixels are whole, and not all of one colour."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(data):
        [length] = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)[:, 1:]
    colors = {tuple(color) for color in pixels.reshape(-1, 3).tolist()}
    assert {(0, 114, 178), (0, 158, 115), (255, 255, 255)} <= colors
    return width, height


def test_failed_requests_show_in_the_status(
    script: ScriptedServer, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDJAX_API_KEY", "of the environment")
    script.fault = lambda number: "503" if number == 1 else None
    assert main(["bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", "2"]) == 1
    assert "1 failed: HTTP 503: no room for 1" in capsys.readouterr().out
    assert script.headers[-1]["Authorization"] == "Bearer of the environment"


def test_no_such_server_and_no_such_model(ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    for address, key, message in (
        ("http://127.0.0.1:1", "k", "no server answers at http://127.0.0.1:1: "),
        (ours, "k", "HTTP 404: the model 'm' does not exist"),
        (ours, "wrong", "HTTP 401: "),
        (ours + "/nothing/v1", "k", "HTTP 404"),
    ):
        assert main(["bench", "serve", "--base-url", address, "--model", "m", "--api-key", key]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pagedjax: error: ")
        assert message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "127.0.0.1:8000"], "--base-url must be an address such as http://127.0.0.1:8000"),
        (["--base-url", "http://h:port"], "--base-url must be an address"),
        (["--base-url", "http://h/?q=1"], "--base-url must be an address"),
        (["--request-rate", "1", "0"], "--request-rate must be above 0, got 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0, got nan"),
        (["--request-rate", "fast"], "--request-rate: invalid float value: 'fast'"),
        (["--request-rate"], "--request-rate: expected at least one argument"),
        (["--burstiness", "0"], "--burstiness must be above 0, got 0"),
        (["--burstiness", "inf"], "--burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, got 0"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--goodput", "ttft"], "--goodput takes ttft, tpot, e2el with milliseconds, such as ttft:500, got ttft"),
        (["--goodput", "itl:5"], "got itl:5"),
        (["--goodput", "ttft:5", "tpot:-1"], "got tpot:-1"),
        (["--endpoint", "responses"], "--endpoint must be completions or chat, got responses"),
        (["--endpoint", "chat", "--vocab-size", "9"], "--vocab-size are for --endpoint completions"),
        (["--tokenizer", "demo", "--vocab-size", "9"], "give one"),
        (["--vocab-size", "0"], "--vocab-size must be at least 1"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object, got [1]"),
        (["--extra-body", "{"], "--extra-body must be a JSON object, got {"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv cannot be read"),
        (["--trace", "/nowhere.csv", "--burstiness", "2"], "--burstiness is for requests without a trace"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: there is no folder /nowhere"),
        (["--json", "/nowhere/x"], "--json /nowhere/x: there is no folder /nowhere"),
    ],
    ids=" ".join,
)
def test_wrong_values(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", "--model", "m", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("given", ["--base-url", "--model"])
def test_what_must_be_given(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    missing = "--model" if given == "--base-url" else "--base-url"
    assert main(["bench", "serve", given, "http://127.0.0.1:1"]) == 2
    assert f"{missing} must be given; see pagedjax bench serve --help" in capsys.readouterr().err


def test_the_key_is_not_shown() -> None:
    config = ServeBench(base_url="http://127.0.0.1:1", model="m", api_key="secret")
    assert "secret" not in repr(config)
    with pytest.raises(UserError):
        bench_serve(config)
