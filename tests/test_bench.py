"""`bench throughput`: what it runs, what it counts, and the traces it reads."""

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest
from chain_model import write_chain_model

from pagedjax.bench import Workload, bench_throughput, clip, measure, random_prompts
from pagedjax.config import EngineConfig, SamplingParams, UserError
from pagedjax.metrics import Metrics
from pagedjax.request import CompletionOutput, RequestMetrics, RequestOutput
from pagedjax.traces import TraceRequest, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319601,3180,8

2023-11-17 18:17:03.9799600,110,27
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3001.5, "input_length": 732, "output_length": 49, "hash_ids": [0]}
{"timestamp": 63000, "input_length": 5, "output_length": 1}
"""


def write_trace(path: Path, text: str) -> Path:
    """A trace file; gzipped if its name says so."""
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azure_trace(tmp_path: Path, name: str) -> None:
    trace = read_trace(write_trace(tmp_path / name, AZURE))
    assert trace == [
        TraceRequest(0.0, 4808, 10),
        TraceRequest(0.0520001, 3180, 8),
        TraceRequest(86400.0, 110, 27),
    ]


@pytest.mark.parametrize("name", ["mooncake.jsonl", "mooncake.jsonl.gz"])
def test_mooncake_trace(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / name, MOONCAKE)
    trace = [
        TraceRequest(0.0, 6758, 500, (0, 1, 2)),
        TraceRequest(0.0015, 732, 49, (0,)),
        TraceRequest(60.0, 5, 1),
    ]
    assert read_trace(path) == trace
    assert read_trace(path, limit=2) == trace[:2]


def test_azure_time_with_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    assert read_trace(write_trace(tmp_path / "t.csv", text)) == [TraceRequest(0.0, 2162, 5)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", AZURE.replace("110", "-110"), "line 5: ContextTokens is '-110', not a whole number"),
        ("t.csv", AZURE.replace(",27", ""), "line 5: it has 2 columns, and the first line has 3"),
        ("t.csv.gz", AZURE.replace("2023-11-17", "yesterday"), "line 5: TIMESTAMP is 'yesterday 18:17"),
        ("t.csv", AZURE.replace("2023-11-17", "2023-13-17"), "line 5: .*month"),
        ("t.csv", AZURE.replace("ContextTokens", "Tokens"), "line 1: the column ContextTokens is missing"),
        ("t.csv", "", "line 1: the column ContextTokens is missing"),
        ("t.csv", AZURE.splitlines()[0], "holds no requests"),
        ("t.jsonl", MOONCAKE + "{", "line 4: it is not a JSON object"),
        ("t.jsonl", MOONCAKE.replace("732", "true"), "line 2: input_length is True"),
        ("t.jsonl", MOONCAKE.replace('"output_length": 49, ', ""), "line 2: output_length is None"),
        ("t.jsonl", MOONCAKE.replace("3001.5", "Infinity"), "line 2: timestamp is inf"),
        ("t.jsonl.gz", MOONCAKE.replace("[0]", '["a"]'), "line 2: hash_ids is not a list"),
        ("t.txt", AZURE, "must end in .csv"),
    ],
)
def test_malformed_traces(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trace(write_trace(tmp_path / name, text))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv.gz", AZURE.encode()),
        ("t.csv.gz", gzip.compress(AZURE.encode())[:-20]),
        ("t.csv", b"\xff\xfe\xff"),
        ("t.csv", None),
    ],
    ids=["not gzip", "cut off", "not text", "not there"],
)
def test_unreadable_traces(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / name)


def test_lengths_of_a_workload(tmp_path: Path) -> None:
    assert Workload(num_prompts=2, input_len=5, output_len=3).lengths() == [(5, 3), (5, 3)]
    trace = write_trace(tmp_path / "t.csv", AZURE)
    assert Workload(num_prompts=2, trace=trace).lengths() == [(4808, 10), (3180, 8)]
    assert Workload(num_prompts=3, trace=trace, trace_scale=0.05).lengths() == [(240, 1), (159, 1), (6, 1)]
    with pytest.raises(UserError, match="has 3 requests"):
        Workload(num_prompts=4, trace=trace).lengths()


def test_clipping_keeps_outputs_where_it_can() -> None:
    lengths = [(90, 10), (95, 10), (500, 30), (5, 500)]
    assert clip(lengths, 100) == ([(90, 10), (90, 10), (70, 30), (1, 99)], 3)


def test_random_prompts() -> None:
    lengths = [(8, 1), (6, 1), (3, 1)]
    prompts = random_prompts(lengths, vocab_size=1000, shared_prefix_len=4, seed=7)
    assert [len(prompt) for prompt in prompts] == [8, 6, 3]
    assert prompts[0][:4] == prompts[1][:4]
    assert prompts[0][:3] == prompts[2]
    assert prompts[0][4:6] != prompts[1][4:6]
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts == random_prompts(lengths, vocab_size=1000, shared_prefix_len=4, seed=7)
    assert prompts != random_prompts(lengths, vocab_size=1000, shared_prefix_len=4, seed=8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompts": 0},
        {"input_len": 0},
        {"output_len": 0},
        {"shared_prefix_len": 129},
        {"trace_scale": 0.0},
    ],
    ids=str,
)
def test_wrong_workloads(wrong: dict[str, Any]) -> None:
    flag = "--" + next(iter(wrong)).replace("_", "-")
    with pytest.raises(UserError, match=flag):
        Workload(**wrong)


class ScriptedEngine:
    """Gives each request a token a second, the second request from its third second on."""

    kv_waste = 0.25

    def __init__(self) -> None:
        self.metrics = Metrics("scripted")
        self.now = 100.0
        self.params: list[SamplingParams] = []
        self._times: dict[str, RequestMetrics] = {}
        self._counts: dict[str, int] = {}
        # What went before is not the benchmark's.
        self.metrics.observe_preemption("recompute")
        self.metrics.count_compile_after_warmup()
        self.metrics.observe_plan(prompt_tokens=9, recomputed=9, queried=9, hits=9, copies=9)
        self._observe_step(1.0)

    @property
    def has_work(self) -> bool:
        return any(count < params.max_tokens for count, params in self._running())

    def _running(self) -> list[tuple[int, Any]]:
        return list(zip(self._counts.values(), self.params, strict=True))

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self.params.append(params)
        self._counts[request_id] = 0
        self._times[request_id] = RequestMetrics(arrival_time=self.now)

    def step(self) -> list[RequestOutput]:
        self.now += 1
        self._observe_step(0.002)
        outputs = []
        for request_id, (count, params) in zip(self._counts, self._running(), strict=True):
            late = request_id == "1" and self.now < 103
            if count == params.max_tokens or late:
                continue
            self._counts[request_id] += 1
            times = self._times[request_id]
            times.first_token_time = times.first_token_time or self.now
            times.last_token_time = self.now
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    prompt=None,
                    prompt_token_ids=[],
                    outputs=[CompletionOutput(index=0, token_ids=[5])],
                    finished=count + 1 == params.max_tokens,
                    metrics=times,
                )
            )
        if self.now == 102:
            self.metrics.observe_preemption("swap")
            self.metrics.observe_plan(prompt_tokens=5, recomputed=2, queried=7, hits=3, copies=1)
        return outputs

    def _observe_step(self, host_seconds: float) -> None:
        self.metrics.observe_step(num_tokens=1, host_seconds=host_seconds, device_seconds=0.1)


def test_numbers_of_a_scripted_run() -> None:
    engine = ScriptedEngine()
    numbers = measure(cast(Any, engine), [[1, 2], [3, 4, 5]], [4, 3], clock=lambda: engine.now)
    assert [(p.temperature, p.ignore_eos, p.max_tokens) for p in engine.params] == [
        (0.0, True, 4),
        (0.0, True, 3),
    ]
    # Request 0 has tokens at seconds 1, 2, 3, 4; request 1 at 3, 4, 5.
    assert numbers == {
        "num_prompts": 2,
        "prompt_tokens": 5,
        "output_tokens": 7,
        "elapsed_s": 5.0,
        "requests_per_s": 0.4,
        "output_tokens_per_s": 1.4,
        "total_tokens_per_s": 2.4,
        "ttft_ms": {"mean": 2000.0, "median": 2000.0, "p90": 2800.0, "p99": 2980.0},
        "tpot_ms": {"mean": 1000.0, "median": 1000.0, "p90": 1000.0, "p99": 1000.0},
        "itl_ms": {"mean": 1000.0, "median": 1000.0, "p90": 1000.0, "p99": 1000.0},
        "e2el_ms": {"mean": 4500.0, "median": 4500.0, "p90": 4900.0, "p99": 4990.0},
        "preemptions": 1,
        "preemptions_by_mode": {"recompute": 0, "swap": 1},
        "computed_tokens": 5,
        "recomputed_tokens": 2,
        "prefix_cache_queries": 7,
        "prefix_cache_hits": 3,
        "cow_copies": 1,
        "recomputed_share": 0.4,
        "compiles_after_warmup": 0,
        "steps": 5,
        "host_ms_per_step": 2.0,
        "kv_waste": 0.25,
    }


def test_one_token_has_no_gaps() -> None:
    engine = ScriptedEngine()
    numbers = measure(cast(Any, engine), [[1]], [1], clock=lambda: engine.now)
    assert numbers["itl_ms"] is None
    assert numbers["tpot_ms"] is None
    assert numbers["ttft_ms"]["p99"] == 1000.0


def test_a_failed_request_is_no_result() -> None:
    engine = ScriptedEngine()
    failed = RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=[], outputs=[], finished=True, error="internal error 12"
    )
    engine.step = lambda: [failed]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="internal error 12"):
        measure(cast(Any, engine), [[1]], [1], clock=lambda: engine.now)


def test_a_real_engine(tmp_path: Path, step_cache: Path) -> None:
    model = write_chain_model(tmp_path / "model", {"a": "b"}, max_model_len=64).folder
    trace = write_trace(tmp_path / "t.jsonl", MOONCAKE)
    config = EngineConfig(
        model=str(model), load_format="dummy", dtype="float32", max_num_seqs=8, max_num_batched_tokens=8
    )
    said: list[str] = []
    workload = Workload(num_prompts=3, trace=trace, trace_scale=0.1)
    numbers = bench_throughput(config, workload, "1.2.3", said.append)
    assert "2 of 3 requests clipped to 64 tokens in all" in said
    assert numbers["prompt_tokens"] == 14 + 59 + 1
    assert numbers["output_tokens"] == 50 + 5 + 1
    assert numbers["compiles_after_warmup"] == 0
    assert 0 < numbers["kv_waste"] < 0.5
    assert numbers["host_ms_per_step"] > 0
    assert numbers["peak_rss_mib"] > 50
    assert (numbers["version"], numbers["dtype"]) == ("1.2.3", "float32")
    spreads = [numbers[name] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")]
    assert all(0 < spread["median"] <= spread["p90"] <= spread["p99"] for spread in spreads)
    assert numbers["ttft_ms"]["mean"] < numbers["e2el_ms"]["mean"] <= 1000 * numbers["elapsed_s"]
    assert json.loads(json.dumps(numbers)) == numbers
