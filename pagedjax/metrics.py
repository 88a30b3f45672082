"""The engine's numbers, kept as plain Python and shown in Prometheus' text format.

Ground floor: it knows nothing of the engine. An observation is a few additions under one lock that nobody
holds for long; prefix and the ``model_name`` label are put on only when someone looks (``render``). Names and
buckets are those of vLLM where it has the same metric, so that its dashboards read these.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

DEFAULT_PREFIX = "pagedjax:"

_TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_SECONDS = (*(m * 10.0**e for e in range(-5, 1) for m in (1, 2, 5)), 10.0)

_GAUGES = {
    "num_requests_running": "Sequences that hold a place in the running batch.",
    "num_requests_waiting": "Sequences that wait: new or preempted.",
    "kv_cache_usage_perc": "Blocks held over blocks, 0 to 1.",
    "kv_cache_fill_perc": "Slots filled over slots held, 0 to 1; what is missing to 1 is wasted.",
    "compiled_shapes": "Shapes of the step that are compiled.",
}
_COUNTERS = {
    "prefix_cache_queries": "Tokens of admitted requests that were looked for in the prefix cache.",
    "prefix_cache_hits": "Tokens that were found in the prefix cache and not computed.",
    "recomputed_tokens": "Tokens computed again, after a preemption or where a sample found no lane to fork into.",
    "cow_copies": "Blocks copied because a sequence was about to write into one that others hold too.",
    "prompt_tokens": "Prompt tokens computed, those computed again not counted.",
    "generation_tokens": "Tokens generated.",
    "compiles_after_warmup": "Compilations after warm-up: each is a stall, and there should be none.",
}
_LABELLED = {  # name: (type, label, documentation)
    "kv_blocks": ("gauge", "state", "Blocks by state: free, cached (reusable) or referenced."),
    "num_preemptions": ("counter", "mode", "Sequences that lost their blocks to others."),
    "request_success": ("counter", "finished_reason", "Requests that ended, by reason."),
    "admission_rejections": ("counter", "reason", "Requests that were not taken in, by reason."),
}
_FINISHED_REASONS = ("stop", "length", "abort", "error")


def _one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``largest``."""
    bounds = (m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5))
    return tuple(b for b in bounds if b <= largest)


@dataclass(slots=True)
class _Histogram:
    documentation: str
    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def metric(self, name: str, labels: dict[str, str]) -> Metric:
        metric = Metric(name, self.documentation, "histogram")
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            metric.add_sample(f"{name}_bucket", labels | {"le": floatToGoString(bound)}, running)
        metric.add_sample(f"{name}_count", labels, running)
        metric.add_sample(f"{name}_sum", labels, self.total)
        return metric


def _histograms(max_model_len: int) -> dict[str, _Histogram]:
    tokens = _one_two_five(max_model_len)
    return {
        "time_to_first_token_seconds": _Histogram("From arrival to the first token.", _TTFT_SECONDS),
        "inter_token_latency_seconds": _Histogram("Between two tokens of a sequence.", _TOKEN_SECONDS),
        "request_time_per_output_token_seconds": _Histogram(
            "Mean time per token after the first, by request.", _TOKEN_SECONDS
        ),
        "e2e_request_latency_seconds": _Histogram("From arrival to the end.", _REQUEST_SECONDS),
        "request_queue_time_seconds": _Histogram("From arrival until first scheduled.", _REQUEST_SECONDS),
        "request_prefill_time_seconds": _Histogram("From first scheduled to the first token.", _REQUEST_SECONDS),
        "request_decode_time_seconds": _Histogram("From the first token to the last.", _REQUEST_SECONDS),
        "request_prompt_tokens": _Histogram("Prompt tokens, by request.", tokens),
        "request_generation_tokens": _Histogram("Tokens generated, by request.", tokens),
        "iteration_tokens_total": _Histogram("Tokens computed in a step.", _STEP_TOKENS),
        "step_host_seconds": _Histogram("Host time of a step: schedule, pack, commit.", _STEP_SECONDS),
        "step_device_seconds": _Histogram("Device time of a step.", _STEP_SECONDS),
    }


@dataclass(frozen=True)
class _View:
    """What a registry collects: the numbers under one prefix and model name."""

    metrics: "Metrics"
    prefix: str
    model_name: str

    def collect(self) -> Iterator[Metric]:
        return iter(self.metrics.collect(self.prefix, self.model_name))


class Metrics:
    """Counts what the engine does. Every method may be called from any thread.

    ``max_model_len`` (tokens) bounds the buckets of the histograms that count a request's tokens.
    """

    def __init__(self, model_name: str, prefix: str = DEFAULT_PREFIX, *, max_model_len: int = 131_072) -> None:
        self.model_name = model_name
        self.prefix = prefix
        self._lock = threading.Lock()
        self._gauges = dict.fromkeys(_GAUGES, 0.0)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._labelled: dict[str, dict[str, int]] = {name: {} for name in _LABELLED}
        self._labelled["kv_blocks"] = dict.fromkeys(("free", "cached", "referenced"), 0)
        self._labelled["num_preemptions"] = dict.fromkeys(("recompute", "swap"), 0)
        self._labelled["admission_rejections"]["queue_full"] = 0
        self._labelled["request_success"] = dict.fromkeys(_FINISHED_REASONS, 0)
        self._histograms = _histograms(max_model_len)
        self._cache_config: dict[str, str] = {}

    def observe_step(self, num_tokens: int, host_seconds: float, device_seconds: float) -> None:
        """One step ended. Times in seconds."""
        with self._lock:
            self._histograms["iteration_tokens_total"].observe(num_tokens)
            self._histograms["step_host_seconds"].observe(host_seconds)
            self._histograms["step_device_seconds"].observe(device_seconds)

    def set_occupancy(
        self,
        *,
        running: int,
        waiting: int,
        blocks_held: int,
        blocks_cached: int,
        blocks_total: int,
        slots_filled: int,
        slots_held: int,
    ) -> None:
        """Who is there now: ``running`` and ``waiting`` count sequences."""
        with self._lock:
            gauges = self._gauges
            gauges["num_requests_running"] = running
            gauges["num_requests_waiting"] = waiting
            gauges["kv_cache_usage_perc"] = blocks_held / blocks_total if blocks_total else 0.0
            # Nothing held is nothing wasted.
            gauges["kv_cache_fill_perc"] = slots_filled / slots_held if slots_held else 1.0
            blocks = self._labelled["kv_blocks"]
            blocks["referenced"] = blocks_held
            blocks["cached"] = blocks_cached
            blocks["free"] = blocks_total - blocks_held - blocks_cached

    def observe_first_token(self, ttft: float) -> None:
        """A request's first token came ``ttft`` seconds after the request."""
        self._observe("time_to_first_token_seconds", ttft)

    def observe_token_gap(self, itl: float) -> None:
        """A sequence's next token came ``itl`` seconds after the one before."""
        self._observe("inter_token_latency_seconds", itl)

    def observe_finished(
        self,
        reason: str,
        prompt_tokens: int,
        output_tokens: int,
        e2e: float,
        queue: float,
        prefill: float,
        decode: float,
        tpot: float | None,
    ) -> None:
        """A request ended for ``reason``; times in seconds, ``tpot`` None where there was no second token."""
        with self._lock:
            self._add_labelled("request_success", reason, 1)
            histograms = self._histograms
            histograms["request_prompt_tokens"].observe(prompt_tokens)
            histograms["request_generation_tokens"].observe(output_tokens)
            histograms["e2e_request_latency_seconds"].observe(e2e)
            histograms["request_queue_time_seconds"].observe(queue)
            histograms["request_prefill_time_seconds"].observe(prefill)
            histograms["request_decode_time_seconds"].observe(decode)
            if tpot is not None:
                histograms["request_time_per_output_token_seconds"].observe(tpot)

    def observe_plan(self, *, prompt_tokens: int, recomputed: int, queried: int, hits: int, copies: int) -> None:
        """A step was planned: tokens of prompts computed first and tokens computed again; tokens looked for in the
        prefix cache and found there; blocks copied on write."""
        with self._lock:
            counters = self._counters
            counters["prompt_tokens"] += prompt_tokens
            counters["recomputed_tokens"] += recomputed
            counters["prefix_cache_queries"] += queried
            counters["prefix_cache_hits"] += hits
            counters["cow_copies"] += copies

    def observe_generation_tokens(self, n: int) -> None:
        """``n`` tokens were generated."""
        self._count("generation_tokens", n)

    def observe_preemption(self, mode: str) -> None:
        """A sequence lost its blocks (``mode`` recompute or swap)."""
        with self._lock:
            self._add_labelled("num_preemptions", mode, 1)

    def observe_rejection(self, reason: str) -> None:
        """A request was not taken in, such as for a full queue (``queue_full``)."""
        with self._lock:
            self._add_labelled("admission_rejections", reason, 1)

    def set_compiled_shapes(self, n: int) -> None:
        """``n`` shapes of the step are compiled."""
        with self._lock:
            self._gauges["compiled_shapes"] = n

    def count_compile_after_warmup(self) -> None:
        """Something was compiled although warm-up had ended."""
        self._count("compiles_after_warmup", 1)

    def set_cache_config(self, config: Mapping[str, object]) -> None:
        """The cache's settings, shown as the labels of ``cache_config_info``."""
        with self._lock:
            self._cache_config = {key: str(value) for key, value in config.items()}

    def render(self, prefix: str | None = None, model_name: str | None = None) -> bytes:
        """Prometheus' text exposition, under the given prefix and model name or those given at the start."""
        view = _View(self, self.prefix if prefix is None else prefix, model_name or self.model_name)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(view)
        return generate_latest(registry)

    def as_dict(self) -> dict[str, float]:
        """The numbers by name, without prefix.

        A histogram gives ``name_count`` and ``name_sum``; a labelled metric gives ``name{label=value}`` for
        each value and their sum as ``name``.
        """
        with self._lock:
            numbers: dict[str, float] = {**self._gauges, **self._counters}
            for name, (_, label, _) in _LABELLED.items():
                values = self._labelled[name]
                numbers[name] = sum(values.values())
                numbers |= {f"{name}{{{label}={value}}}": number for value, number in values.items()}
            for name, histogram in self._histograms.items():
                numbers[f"{name}_count"] = sum(histogram.counts)
                numbers[f"{name}_sum"] = histogram.total
            return numbers

    def collect(self, prefix: str, model_name: str) -> list[Metric]:
        """All metrics as Prometheus' client describes them, at one moment."""
        labels = {"model_name": model_name}
        metrics = []
        with self._lock:
            for name, documentation in _GAUGES.items():
                metrics.append(_metric(prefix + name, documentation, "gauge", [(labels, self._gauges[name])]))
            for name, documentation in _COUNTERS.items():
                metrics.append(_metric(prefix + name, documentation, "counter", [(labels, self._counters[name])]))
            for name, (kind, label, documentation) in _LABELLED.items():
                samples = [(labels | {label: value}, number) for value, number in self._labelled[name].items()]
                metrics.append(_metric(prefix + name, documentation, kind, samples))
            info = [(labels | self._cache_config, 1.0)] if self._cache_config else []
            metrics.append(_metric(prefix + "cache_config_info", "Settings of the KV cache, as labels.", "gauge", info))
            metrics += [histogram.metric(prefix + name, labels) for name, histogram in self._histograms.items()]
        return metrics

    def _observe(self, name: str, value: float) -> None:
        with self._lock:
            self._histograms[name].observe(value)

    def _count(self, name: str, n: int) -> None:
        with self._lock:
            self._counters[name] += n

    def _add_labelled(self, name: str, value: str, n: int) -> None:
        values = self._labelled[name]
        values[value] = values.get(value, 0) + n


def _metric(name: str, documentation: str, kind: str, samples: Sequence[tuple[dict[str, str], float]]) -> Metric:
    metric = Metric(name, documentation, kind)
    for labels, value in samples:
        metric.add_sample(f"{name}_total" if kind == "counter" else name, labels, value)
    return metric
