"""What ``bench serve`` found: as numbers, and as the table that users of ``vllm bench serve`` know."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.bench_client import Answer
from pagedjax.bench_plot import line_charts
from pagedjax.latency import latencies, spread, throughput

_WIDTH = 50  # of the table, and of the names in it
_NAMES = 40
_LATE = 100.0  # milliseconds that a request may be sent late before the table says so
_SECTIONS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """All requests at one rate.

    Attributes:
        answers: in the order of the arrivals.
        elapsed: seconds from the first arrival to the end of the last answer.
        send_delays: seconds by which each request was sent later than it should have been.
        request_rate: requests per second; None: a trace's own.
        max_concurrency: requests that ran at once at the most; None: no limit.
    """

    answers: Sequence[Answer]
    elapsed: float
    send_delays: Sequence[float]
    request_rate: float | None
    max_concurrency: int | None


def numbers_of(run: Run, goals: Mapping[str, float]) -> dict[str, Any]:
    """A run's numbers, by the names of ``latency``. Latencies and tokens are those of the answers that are whole.

    Args:
        run: what was measured.
        goals: seconds that a good request's ``ttft``, ``tpot`` and ``e2el`` are within; may be empty.
    """
    whole = [answer for answer in run.answers if answer.failure is None]
    prompt_tokens, output_tokens = (sum(getattr(a, name) for a in whole) for name in ("prompt_tokens", "output_tokens"))
    numbers = throughput(len(whole), prompt_tokens, output_tokens, run.elapsed)
    numbers |= latencies(
        ttft=[answer.ttft for answer in whole if answer.ttft is not None],
        tpot=[answer.tpot for answer in whole if answer.tpot is not None],
        itl=[gap for answer in whole for gap in np.diff(answer.chunks).tolist()],
        e2el=[answer.e2el for answer in whole],
    )
    numbers |= {
        "num_prompts": len(run.answers),
        "completed": len(whole),
        "failed": len(run.answers) - len(whole),
        "failures": _failures(run.answers),
        "without_usage": sum(not answer.has_usage for answer in whole),
        # JSON has no infinity.
        "request_rate": "inf" if run.request_rate == math.inf else run.request_rate,
        "max_concurrency": run.max_concurrency,
        "peak_concurrent_requests": _peak([(answer.sent, answer.ended) for answer in run.answers]),
        "send_delay_ms": spread(run.send_delays),
    }
    if goals:
        good = sum(all((getattr(answer, name) or 0.0) <= goal for name, goal in goals.items()) for answer in whole)
        numbers["goodput_ms"] = {name: 1000 * goal for name, goal in goals.items()}
        numbers |= {"good": good, "goodput_requests_per_s": round(good / run.elapsed, 3)}
    return numbers


def _failures(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """How many of each kind, and what the first of them said."""
    found: dict[str, list[str]] = defaultdict(list)
    for answer in answers:
        if answer.failure is not None:
            found[answer.failure].append(answer.message)
    return {kind: {"count": len(messages), "message": messages[0]} for kind, messages in sorted(found.items())}


def _peak(spans: Sequence[tuple[float, float]]) -> int:
    """The most that ran at once; one that ends when another begins makes room for it."""
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)


def table(numbers: Mapping[str, Any]) -> str:
    """The numbers as text, a name and a value in each line."""
    lines = [_title("Serving Benchmark Result", "=")]
    lines += [_row(name, value) for name, value in _counts(numbers).items()]
    for key, title in _SECTIONS.items():
        lines.append(_title(title, "-"))
        found = numbers[f"{key}_ms"] or {}
        for statistic in ("mean", "median", "p99"):
            name = f"{statistic.capitalize()} {key.upper()} (ms):"
            lines.append(_row(name, found.get(statistic, "n/a")))
    lines.append("=" * _WIDTH)
    if count := numbers["without_usage"]:
        lines.append(f"{count} answers came without usage: prompt tokens as sent, output tokens counted by chunks")
    late = numbers["send_delay_ms"]["p99"]
    if late > _LATE and numbers["max_concurrency"] is None and numbers["request_rate"] != "inf":
        lines.append(f"requests were sent up to {late:.0f} ms late (P99): this client is too slow for the rate")
    for kind, failure in numbers["failures"].items():
        lines.append(f"{failure['count']} failed: {kind}" + (f": {failure['message']}" if failure["message"] else ""))
    return "\n".join(lines)


def _counts(numbers: Mapping[str, Any]) -> dict[str, Any]:
    rate = numbers["request_rate"]
    rows = {
        "Successful requests:": numbers["completed"],
        "Failed requests:": numbers["failed"],
        "Maximum request concurrency:": numbers["max_concurrency"],
        "Request rate configured (RPS):": "trace" if rate is None else rate if rate == "inf" else float(rate),
        "Benchmark duration (s):": numbers["elapsed_s"],
        "Total input tokens:": numbers["prompt_tokens"],
        "Total generated tokens:": numbers["output_tokens"],
        "Request throughput (req/s):": numbers["requests_per_s"],
        "Request goodput (req/s):": numbers.get("goodput_requests_per_s"),
        "Output token throughput (tok/s):": numbers["output_tokens_per_s"],
        "Peak concurrent requests:": numbers["peak_concurrent_requests"],
        "Total token throughput (tok/s):": numbers["total_tokens_per_s"],
    }
    return {name: value for name, value in rows.items() if value is not None}


def _title(text: str, fill: str) -> str:
    return f"{f' {text} ' if fill == '=' else text:{fill}^{_WIDTH}}"


def _row(name: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<{_NAMES}} {text:<{_WIDTH - _NAMES - 1}}".rstrip()


def plot(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG of latency against request rate, a point for each run.

    Raises:
        UserError: the file cannot be written.
    """
    rates = [run["request_rate"] for run in runs]
    groups = ["trace" if rate is None else rate if rate == "inf" else f"{rate:g}".replace("+", "") for rate in rates]
    statistics = ("mean", "median", "p99")
    panels = {
        f"{key.upper()} (ms)": {name: [(run[f"{key}_ms"] or {}).get(name) for run in runs] for name in statistics}
        for key in _SECTIONS
    }
    line_charts(path, "Latency against requests per second", groups, panels)
