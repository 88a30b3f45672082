"""The command line: its flags, what it prints where, its exit statuses, and how fast it answers."""

import dataclasses
import http.client
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chain_model import ChainModel, write_chain_model

from pagedjax.bench_serve import ServeBench
from pagedjax.cli import DEFAULT_MAX_QUEUE, main
from pagedjax.cli_flags import (
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    SERVE_BENCH_FLAGS,
    SERVER_FLAGS,
    SIMULATION_FLAGS,
    Flag,
)
from pagedjax.config import EngineConfig, SamplingParams, UserError
from pagedjax.engine import Engine
from pagedjax.loading import load_engine
from pagedjax.prompts import Prompt, read_prompts
from pagedjax.request import CompletionOutput, RequestOutput
from pagedjax.simulate import SimulationConfig
from server import ServerConfig

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "pagedjax.cli"]
SMALL = ["--max-num-seqs", "8", "--max-num-batched-tokens", "8"]  # one shape to compile
RECITED = "Hello, wörld 😀!"


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> ChainModel:
    """``<go>`` recites a text; ``a`` and ``b`` follow each other for ever."""
    folder = tmp_path_factory.mktemp("model")
    recite = {"<go>": RECITED, "<|assistant|>": "An answer."}
    return write_chain_model(folder, {"a": "b", "b": "a"}, recite=recite, max_model_len=4096)


@pytest.fixture(scope="module")
def engine(chain: ChainModel, step_cache: Path) -> Engine:
    return load_engine(EngineConfig(model=str(chain.folder), max_num_seqs=8, max_num_batched_tokens=8))


@pytest.fixture
def generate(
    engine: Engine,
    chain: ChainModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``pagedjax generate`` on an engine that is loaded already; status, output, errors."""
    monkeypatch.setattr("pagedjax.generate.load_engine", lambda config, template: engine)

    def run(*args: str) -> tuple[int, str, str]:
        status = main(["generate", str(chain.folder), "--temperature", "0", *args])
        return status, *capsys.readouterr()

    return run


# ---- flags ----


def default_of(field: dataclasses.Field[Any]) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return str(field.default)


@pytest.mark.parametrize(
    ("flags", "settings", "without"),
    [
        (ENGINE_FLAGS, EngineConfig, {"model"}),  # the argument
        (SERVER_FLAGS, ServerConfig, set()),
        (SIMULATION_FLAGS, SimulationConfig, set()),
        (SERVE_BENCH_FLAGS, ServeBench, set()),
        (
            SAMPLING_FLAGS,
            SamplingParams,
            # `seed` is the engine's flag, a grammar is no word; the effect of the others could not be seen.
            {
                "seed",
                "best_of",
                "logprobs",
                "prompt_logprobs",
                "logit_bias",
                "allowed_token_ids",
                "priority",
                "structured_outputs",
            },
        ),
    ],
)
def test_a_flag_for_every_setting(flags: tuple[Flag, ...], settings: Any, without: set[str]) -> None:
    fields = {field.name: field for field in dataclasses.fields(settings)}
    assert sorted(flag.field for flag in flags) == sorted(set(fields) - without)
    plain = {name for name, field in fields.items() if field.default not in (None, (), dataclasses.MISSING)}
    stated = {flag.field: flag.default for flag in flags if flag.field in plain}
    # A default of None means something that only words can say.
    assert stated == {name: default_of(fields[name]) for name in stated}


@pytest.mark.parametrize(
    ("command", "tables"),
    [
        (["serve"], (ENGINE_FLAGS, SERVER_FLAGS)),
        (["generate"], (ENGINE_FLAGS, SAMPLING_FLAGS)),
        (["bench", "throughput"], (ENGINE_FLAGS,)),
        (["bench", "serve"], (SERVE_BENCH_FLAGS,)),
        (["simulate"], (SIMULATION_FLAGS,)),
    ],
)
def test_help_names_every_flag(
    command: list[str], tables: tuple[tuple[Flag, ...], ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for flag in (flag for table in tables for flag in table):
        name = flag.options[-1] if flag.options else "--" + flag.field.replace("_", "-")
        assert name in text.replace(",", " ").split()
        assert f"{flag.meaning} (default: {flag.default})".replace("- ", "-") in text.replace("- ", "-")


NOWHERE = ["bench", "serve", "--model", "m", "--base-url", "http://127.0.0.1:1"]  # it has looked for a server


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["serve"], NOWHERE], ids=str)
def test_usage_does_not_wait_for_jax(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom pagedjax.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    command = [sys.executable, "-c", program, *arguments]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("pagedjax ")


# ---- errors of the user ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND; see pagedjax --help"),
        (["fly"], "invalid choice: 'fly'"),
        (["serve"], "required: MODEL; see pagedjax serve --help"),
        (["bench"], "required: COMMAND; see pagedjax bench --help"),
        (["serve", "demo", "--max-model", "3"], "unknown argument --max-model; see pagedjax serve --help"),
        (["serve", "demo", "--port", "x"], "--port: invalid int value: 'x'; see pagedjax serve --help"),
        (["serve", "demo", "--port", "70000"], "--port must be from 0 to 65535"),
        (["serve", "demo", "--block-size", "7"], "--block-size must be 8, 16"),
        (["serve", "demo", "--speculative-config", "{}"], "--speculative-config {} is not built yet"),
        (["serve", "demo", "--swap-space", "2g", "--preemption-mode", "recompute"], "--swap-space is for"),
        (["serve", "demo", "--scheduling-policy", "lottery"], "--scheduling-policy"),
        (["serve", "demo", "--kv-cache-memory", "much"], "'much' is not a size"),
        (["serve", "demo", "--max-queue", "0"], "--max-queue must be at least 1"),
        (["serve", "demo", "--chat-template", "/nowhere"], "--chat-template /nowhere cannot be read"),
        (["generate", "demo"], "--prompt --prompts-file is required"),
        (["generate", "demo", "--prompt", "x", "--prompts-file", "x"], "not allowed with"),
        (
            ["generate", "demo", "--prompt", "x", "--top-p", "7"],
            "--top-p must be a number from 0 to 1, got 7",
        ),
        (["generate", "demo", "--prompts-file", "/nowhere"], "/nowhere cannot be read: No such file"),
        (["generate", "/nowhere/at/all", "--prompt", "x"], "/nowhere/at/all does not exist"),
        (["bench", "throughput", "demo", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["bench", "throughput", "demo", "--json", "/nowhere/x"], "there is no folder /nowhere"),
        (["bench", "throughput", "demo", "--trace", "/nowhere.csv"], "/nowhere.csv cannot be read"),
        (["plan", "demo", "--anything"], "`pagedjax plan` is not built yet"),
        (["bench", "throughput", "demo", "--step-times", "/nowhere/x"], "--step-times /nowhere/x: there is no folder"),
        (["simulate"], "required: TRACE; see pagedjax simulate --help"),
        (["simulate", "t.csv", "--num-kv-blocks", "9"], "--step-time-model must be given; see pagedjax simulate"),
        (["simulate", "t.csv", "--step-time-model", "x"], "--num-kv-blocks must be given"),
        (["simulate", "t.csv", "--num-kv-blocks", "9", "--step-time-model", "fit"], "say which with --model"),
        (["simulate", "t.csv", "--num-kv-blocks", "9", "--step-time-model", "/no"], "step times /no cannot be read"),
        (["convert", "--help"], "`pagedjax convert` is not built yet"),
        (["bench", "latency", "demo"], "`pagedjax bench latency` is not built yet"),
        (["bench", "serve", "--model", "m"], "--base-url must be given; see pagedjax bench serve --help"),
    ],
    ids=" ".join,
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagedjax: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\n \n", "holds no prompts"),
        ("p.txt", b"\xff", "is not UTF-8 text"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": 3}', "p.jsonl line 3 is not a JSON object with a prompt"),
        ("p.jsonl", b'{"prompt": [1, true]}', "line 1 is not"),
        ("p.jsonl", b'{"prompt": []}', "line 1 is not"),
        ("p.jsonl", b"[]", "line 1 is not"),
        ("p.jsonl", b"{", "line 1 is not"),
    ],
)
def test_malformed_prompts(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one \r\n\n  two\u2028x\n", encoding="utf-8")
    assert read_prompts(text) == [Prompt(f"{text} line 1", "one "), Prompt(f"{text} line 3", "  two\u2028x")]
    rows.write_text('{"prompt": "a\\nb", "id": 7}\n{"prompt": [1, 2]}\n', encoding="utf-8")
    assert [prompt.content for prompt in read_prompts(rows)] == ["a\nb", [1, 2]]


# ---- serve ----


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``pagedjax serve`` hands on: ``config``, and the model and the keywords of ``AsyncLLM``."""
    seen: dict[str, Any] = {}

    def serve(config: ServerConfig, load: Callable[[], Any]) -> int:
        seen["config"] = config
        load()
        return 0

    def load(model: str, **keywords: Any) -> None:
        seen.update(model=model, keywords=keywords)

    monkeypatch.setattr("server.serve", serve)
    monkeypatch.setattr("pagedjax.async_engine.AsyncLLM", load)
    monkeypatch.delenv("PAGEDJAX_API_KEY", raising=False)
    return seen


def test_serve_without_flags(served: dict[str, Any]) -> None:
    assert main(["serve", "demo"]) == 0
    assert served["config"] == ServerConfig()
    assert served["model"] == "demo"
    assert served["keywords"] == {"max_queue": DEFAULT_MAX_QUEUE, "chat_template": None}


def test_serve_with_flags(served: dict[str, Any], tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")
    flags = [
        "--api-key",
        "one",
        "--api-key",
        "two",
        "--shutdown-timeout",
        "5",
        "--log-requests",
        "--port",
        "0",
    ]
    flags += [
        "--max-queue",
        "3",
        "--chat-template",
        str(template),
        "--kv-cache-memory",
        "2GiB",
        "--seed",
        "7",
    ]
    assert main(["serve", "demo", "--no-enable-prefix-caching", *flags]) == 0
    expected = ServerConfig(api_keys=("one", "two"), shutdown_timeout=5.0, log_requests=True, port=0)
    assert served["config"] == expected
    assert served["keywords"] == {
        "max_queue": 3,
        "chat_template": "{{ messages }}",
        "enable_prefix_caching": False,
        "kv_cache_memory": "2GiB",
        "seed": 7,
    }


def test_api_key_of_the_environment(
    served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEDJAX_API_KEY", "secret")
    assert main(["serve", "demo"]) == 0
    assert served["config"].api_keys == ("secret",)
    assert main(["serve", "demo", "--api-key", "other"]) == 0
    assert served["config"].api_keys == ("other",)
    monkeypatch.setenv("PAGEDJAX_API_KEY", "")  # a secret that was lost must not leave the door open
    assert main(["serve", "demo"]) == 2
    assert "PAGEDJAX_API_KEY" in capsys.readouterr().err


@pytest.fixture
def started(chain: ChainModel, step_cache: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a command on the chain model in a process of its own."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: str, *args: str) -> subprocess.Popen[bytes]:
        line = [*PROGRAM, command, str(chain.folder), *SMALL, *args]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(line, cwd=ROOT, stdout=pipe, stderr=pipe))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_server_from_start_to_end(
    started: Callable[..., subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    process = started("serve", "--port", "0")
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(b"pagedjax: ready on http://127.0.0.1:"):
            break
    port = int(said[-1].rsplit(b":", 1)[1])

    assert main(["serve", "demo", "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 is taken" in capsys.readouterr().err

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": "x", "prompt": "<go>", "max_tokens": 50, "stream": True}
    connection.request("GET", "/v1/models")
    body["model"] = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert text_of(connection.getresponse()) == RECITED

    body |= {"prompt": "a", "max_tokens": 299}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data: ")
    process.send_signal(signal.SIGTERM)
    assert text_of(stream).endswith("babab")  # a running request may end
    assert process.wait(30) == 0
    connection.close()
    assert b"Traceback" not in process.stderr.read()


def text_of(stream: http.client.HTTPResponse) -> str:
    """The text of a stream that ends as it should."""
    events = [line.removeprefix(b"data: ").strip() for line in stream if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


# ---- generate ----


class RecordingOutput(io.StringIO):
    """Standard output that remembers what had been written at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def test_text_streams(generate: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    output = RecordingOutput()
    monkeypatch.setattr(sys, "stdout", output)
    status, _, err = generate("--prompt", "<go>", "--max-tokens", "50")
    assert status == 0
    assert output.getvalue() == RECITED + "\n"
    assert len(set(output.flushed)) > 5
    assert "\ufffd" not in "".join(output.flushed)  # no broken character on the way
    assert "error" not in err


def test_prompts_in_a_file(generate: Callable[..., tuple[int, str, str]], chain: ChainModel, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    # The first one ends last: its line comes first all the same.
    prompts: list[str | list[int]] = ["a", "<go>", [chain.id("b")]]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    status, out, _ = generate("--prompts-file", str(path), "--max-tokens", "40")
    assert status == 0
    a, b = chain.id("a"), chain.id("b")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"prompt": "a", "text": "ba" * 20, "token_ids": [b, a] * 20, "finish_reason": "length"},
        {"prompt": "<go>", "text": RECITED, "token_ids": chain.follow("<go>"), "finish_reason": "stop"},
        {"prompt": [b], "text": "ab" * 20, "token_ids": [a, b] * 20, "finish_reason": "length"},
    ]


def test_sampling_flags(generate: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = generate("--prompt", "<go>", "-n", "2", "--stop", "wör", "--stop", "never")
    assert status == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["index"], row["text"], row["finish_reason"]) for row in rows] == [
        (0, "Hello, ", "stop"),
        (1, "Hello, ", "stop"),
    ]


def test_chat(generate: Callable[..., tuple[int, str, str]]) -> None:
    assert generate("--prompt", "Hi", "--chat") == (0, "An answer.\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt: prompt has no tokens"),
        (["--prompt", "\udcff"], "--prompt: it is not UTF-8 text"),
        (["--prompt", "a", "--max-tokens", "4096"], "--prompt: prompt has 1 tokens and max_tokens is 4096"),
    ],
    ids=ascii,
)
def test_prompts_that_cannot_be_served(
    generate: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    status, out, err = generate(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_failed_request(
    engine: Engine, generate: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[RequestOutput]:
        engine.abort("0")
        sample = CompletionOutput(index=0, text="so far", finish_reason="error")
        return [
            RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=[],
                outputs=[sample],
                finished=True,
                error="broken",
            )
        ]

    monkeypatch.setattr(engine, "step", fail)
    assert generate("--prompt", "a") == (1, "so far\n", "pagedjax: error: --prompt: broken\n")


@pytest.mark.parametrize(("end", "status"), [("interrupt", 130), ("close", 141)])
def test_ends_from_outside(started: Callable[..., subprocess.Popen[bytes]], end: str, status: int) -> None:
    # Shells start what runs in the background with the signal ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = started("generate", "--prompt", "a", "--max-tokens", "4000", "--temperature", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 1) in (b"a", b"b")
    if end == "interrupt":
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(30) == status
    assert b"Traceback" not in errors
    assert b"Error" not in errors
    process.stdout = None  # nothing is left for `communicate`


# ---- bench ----


def test_throughput(chain: ChainModel, step_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    sizes = ["--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--json", str(path)]
    assert main(["bench", "throughput", str(chain.folder), *SMALL, *sizes]) == 0
    out, err = capsys.readouterr()
    numbers = json.loads(out)
    assert numbers == json.loads(path.read_text())
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (60, 15)
    keys = "elapsed_s requests_per_s output_tokens_per_s total_tokens_per_s ttft_ms tpot_ms itl_ms "
    keys += "e2el_ms kv_waste preemptions compiles_after_warmup host_ms_per_step peak_rss_mib version "
    keys += "jax device dtype"
    assert set(keys.split()) <= set(numbers)
    assert "blocks of 16" in err


def test_throughput_that_does_not_fit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagedjax.bench.load_engine", lambda config, say: engine)
    assert main(["bench", "throughput", "demo", "--num-prompts", "1", "--input-len", "4096"]) == 2
    assert "--max-model-len" in capsys.readouterr().err
    assert not engine.has_work


# ---- simulate ----


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that measure find an engine that is loaded already."""
    for module in ("bench", "calibrate"):
        monkeypatch.setattr(f"pagedjax.{module}.load_engine", lambda config, say: engine)


@pytest.mark.usefixtures("loaded")
def test_simulating_what_was_measured(chain: ChainModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, steps, trace = str(chain.folder), tmp_path / "steps.jsonl", tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:17:03.5,40,9\n" * 6)
    load = ["--trace", str(trace), "--num-prompts", "6"]
    assert main(["bench", "throughput", model, *load, *SMALL, "--step-times", str(steps)]) == 0
    measured = json.loads(capsys.readouterr().out)
    sizes = [*SMALL, "--num-kv-blocks", "64", "--request-rate", "inf"]
    written = tmp_path / "numbers.json"
    command = ["simulate", str(trace), *sizes, "--step-time-model"]
    assert main([*command, str(steps), "--json", str(written)]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated == json.loads(written.read_text())
    assert len(steps.read_text().splitlines()) == 1 + measured["steps"]
    for name in ("steps", "prompt_tokens", "output_tokens", "preemptions"):
        assert simulated[name] == measured[name]
    fitted = tmp_path / "model.json"
    fitted.write_text(json.dumps(simulated["step_time_model"]))
    assert main([*command, str(fitted)]) == 0
    assert json.loads(capsys.readouterr().out)["ttft_ms"] == simulated["ttft_ms"]


@pytest.mark.usefixtures("loaded")
def test_a_simulation_that_measures_first(
    chain: ChainModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 70, "output_length": 5}\n')
    model = ["--model", str(chain.folder), "--step-time-model", "fit"]
    assert main(["simulate", str(trace), "--num-kv-blocks", "64", *SMALL, *model]) == 0
    out, err = capsys.readouterr()
    numbers = json.loads(out)
    assert numbers["steps"] == 9 + 4
    assert numbers["step_time_model"]["device"]["steps"] > 0
    assert numbers["step_time_model"]["token_buckets"][-1] >= 8
    assert "steps measured" in err
