"""``pagedjax bench throughput``: many requests at once, and what each of them waited for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedjax.bench_workload import Workload, clip, random_prompts
from pagedjax.config import EngineConfig, SamplingParams, UserError
from pagedjax.engine import Engine
from pagedjax.latency import latencies, throughput
from pagedjax.loading import Say, load_engine, say_on_stderr
from pagedjax.request import RequestMetrics
from pagedjax.sizing import MIB, resident_memory
from pagedjax.step_time import StepRecorder
from pagedjax.weights import resolve_dtype

__all__ = ["Workload", "bench_throughput", "clip", "measure", "random_prompts"]


def bench_throughput(
    config: EngineConfig, workload: Workload, version: str, say: Say = say_on_stderr, step_times: Path | None = None
) -> dict[str, Any]:
    """Load a model, run a workload on it, and return the numbers (CONTRACT: ``bench throughput``).

    Loading has compiled every step and run each once: what is measured compiles nothing.

    Args:
        config: of the engine; its seed draws the prompts too.
        workload: what to run.
        version: of pagedjax, for the record.
        say: gets the lines of progress.
        step_times: file that gets a record of each step (see ``step_time``).

    Raises:
        UserError: the model can't be loaded, the workload does not fit, or a file cannot be written.
    """
    lengths = workload.lengths()
    engine = load_engine(config, say=say)
    if workload.trace is not None:
        lengths, clipped = clip(lengths, engine.sizes.max_model_len)
        if clipped:
            say(f"{clipped} of {len(lengths)} requests clipped to {engine.sizes.max_model_len} tokens in all")
    prompts = random_prompts(lengths, engine.vocab_size, workload.shared_prefix_len, config.seed)
    recorder = StepRecorder(engine.shapes.buckets)
    if step_times is not None:
        engine.on_step = recorder
    numbers = measure(engine, prompts, [output for _, output in lengths])
    if step_times is not None:
        recorder.write(step_times)
    device = jax.devices()[0]
    return numbers | {
        # Not getrusage's: Linux starts that with the memory of the process that started this one.
        "peak_rss_mib": round(resident_memory()[1] / MIB, 1),
        "version": version,
        "jax": jax.__version__,
        "device": f"{device.device_kind} ({device.platform})",
        "dtype": resolve_dtype(config.dtype),
        "model": config.model,
    }


@dataclass
class _Timeline:
    """A request's moments, in seconds: of the engine, and when each of its tokens came out."""

    metrics: RequestMetrics | None = None
    tokens: list[float] = field(default_factory=list)


def measure(
    engine: Engine,
    prompts: Sequence[list[int]],
    output_lens: Sequence[int],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Submit all requests at once, run them greedily to their full length, and return the numbers.

    Args:
        engine: warmed up, idle.
        prompts: token ids of each request.
        output_lens: output tokens of each request; the end-of-sequence token is ignored.
        clock: the engine's own, in seconds.

    Raises:
        UserError: a request does not fit.
    """
    before = engine.metrics.as_dict()
    timelines = {str(index): _Timeline() for index in range(len(prompts))}
    began = clock()
    for request_id, prompt, output_len in zip(timelines, prompts, output_lens, strict=True):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
        try:
            engine.add_request(request_id, prompt, params)
        except ValueError as error:
            for other in timelines:
                engine.abort(other)
            raise UserError(f"{error}: give --max-model-len more, or shorter requests") from None
    while engine.has_work:
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            timeline = timelines[output.request_id]
            timeline.metrics = output.metrics
            timeline.tokens += [now] * sum(len(sample.token_ids) for sample in output.outputs)
    elapsed = clock() - began
    after = engine.metrics.as_dict()
    spent = {name: after[name] - before.get(name, 0) for name in after}
    numbers = _numbers(list(timelines.values()), elapsed, sum(map(len, prompts)), spent)
    return numbers | {"kv_waste": round(engine.kv_waste, 5)}


def _numbers(
    timelines: Sequence[_Timeline], elapsed: float, prompt_tokens: int, spent: dict[str, float]
) -> dict[str, Any]:
    ttft, tpot, itl, e2el = [], [], [], []
    for timeline in timelines:
        times, tokens = timeline.metrics, timeline.tokens
        assert times is not None, "every request has an output"
        assert times.first_token_time is not None
        assert times.last_token_time is not None
        ttft.append(times.first_token_time - times.arrival_time)
        e2el.append(times.last_token_time - times.arrival_time)
        if len(tokens) > 1:
            tpot.append((times.last_token_time - times.first_token_time) / (len(tokens) - 1))
        itl += np.diff(tokens).tolist()
    output_tokens = sum(len(timeline.tokens) for timeline in timelines)
    steps = round(spent["step_host_seconds_count"])
    numbers = throughput(len(timelines), prompt_tokens, output_tokens, elapsed)
    numbers |= latencies(ttft=ttft, tpot=tpot, itl=itl, e2el=e2el)
    computed = spent["iteration_tokens_total_sum"]
    counted = ("recomputed_tokens", "prefix_cache_queries", "prefix_cache_hits", "cow_copies")
    return numbers | {
        "preemptions": round(spent["num_preemptions"]),
        "preemptions_by_mode": {
            mode: round(spent[f"num_preemptions{{mode={mode}}}"]) for mode in ("recompute", "swap")
        },
        "computed_tokens": round(computed),
        **{name: round(spent[name]) for name in counted},
        "recomputed_share": round(spent["recomputed_tokens"] / computed, 5),
        "compiles_after_warmup": round(spent["compiles_after_warmup"]),
        "steps": steps,
        "host_ms_per_step": round(1000 * spent["step_host_seconds_sum"] / steps, 4),
    }
