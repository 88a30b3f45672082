"""The simulator: known times worked out by hand, the real engine's numbers, and plans replayed from a record."""

import io
import json
import random
import time
from pathlib import Path
from typing import Any, cast

import golden_models
import pytest

from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.config import BeamSearchParams, SamplingParams, UserError
from pagedjax.engine import Engine, paged_tables
from pagedjax.plan_log import RecordingScheduler, replay
from pagedjax.scheduler import Scheduler
from pagedjax.simulate import SimulationConfig, simulate
from pagedjax.simulator import Simulator, StepTime
from pagedjax.step_time import StepFeatures, StepTimeModel
from pagedjax.swap_space import SwapSpace
from pagedjax.traces import TraceRequest


def scheduler(
    num_blocks: int = 64, *, block_size: int = 4, max_num_seqs: int = 2, token_budget: int = 8, swap_blocks: int = 0
) -> Scheduler:
    tables = BlockTables(
        BlockPool(num_blocks),
        block_size=block_size,
        chunk=token_budget,
        swap=SwapSpace(swap_blocks) if swap_blocks else None,
    )
    return Scheduler(tables, max_num_seqs=max_num_seqs, token_budget=token_budget)


def seconds(device: float, host: float = 0.0) -> StepTime:
    return lambda plan: (device, host)


def ms(mean: float, median: float, p90: float, p99: float) -> dict[str, float]:
    return {"mean": mean, "median": median, "p90": p90, "p99": p99}


TWO = [TraceRequest(0.0, 4, 3), TraceRequest(0.0, 12, 2)]


def test_two_requests_by_hand() -> None:
    """Steps of one second: the second request's prompt takes three of them, beside the first one's tokens.

    Step 1 computes 4 + 4 tokens, step 2 1 + 7, step 3 1 + 1 and step 4 the second's last. The first has its tokens at
    1, 2, 3, the second at 3, 4.
    """
    numbers = Simulator(scheduler(), seconds(1.0)).run(TWO)
    assert numbers.pop("wall_s") < 5
    assert numbers == {
        "num_prompts": 2,
        "prompt_tokens": 16,
        "output_tokens": 5,
        "elapsed_s": 4.0,
        "requests_per_s": 0.5,
        "output_tokens_per_s": 1.25,
        "total_tokens_per_s": 5.25,
        "ttft_ms": ms(2000.0, 2000.0, 2800.0, 2980.0),
        "tpot_ms": ms(1000.0, 1000.0, 1000.0, 1000.0),
        "itl_ms": ms(1000.0, 1000.0, 1000.0, 1000.0),
        "e2el_ms": ms(3500.0, 3500.0, 3900.0, 3990.0),
        "preemptions": 0,
        "preemptions_by_mode": {"recompute": 0, "swap": 0},
        "computed_tokens": 8 + 8 + 2 + 1,
        "recomputed_tokens": 0,
        "recomputed_share": 0.0,
        "prefix_cache_queries": 16,
        "prefix_cache_hits": 0,
        "cow_copies": 0,
        "swap_transfers": 0,
        "running_mean": 2.0,
        "kv_usage_mean": round((2 + 5 + 5 + 6) / 4 / 64, 5),
        "kv_usage_peak": round(6 / 64, 5),
        # After each step, with the next one planned: 16 of 20 slots; 18 of 20; 13 of 16 where the first has left.
        "kv_waste": round(1 - (16 + 18 + 13) / (20 + 20 + 16), 5),
        "steps": 4,
        "host_ms_per_step": 0.0,
    }


@pytest.mark.parametrize(
    ("host", "first_tokens", "elapsed"),
    [
        (0.25, (1.25, 3.25), 4.25),  # hidden behind the device but for the first
        (2.0, (4.0, 8.0), 9.0),  # the device waits: a step is dispatched every two seconds
    ],
)
def test_host_time_overlaps_device_time(host: float, first_tokens: tuple[float, float], elapsed: float) -> None:
    numbers = Simulator(scheduler(), seconds(1.0, host)).run(TWO)
    assert numbers["ttft_ms"]["mean"] == 1000 * sum(first_tokens) / 2
    assert numbers["ttft_ms"]["median"] == 1000 * sum(first_tokens) / 2
    assert numbers["elapsed_s"] == elapsed
    assert numbers["host_ms_per_step"] == 1000 * host


def test_requests_come_when_the_trace_says() -> None:
    requests = [TraceRequest(10.0, 3, 1), TraceRequest(0.5, 3, 2), TraceRequest(0.0, 3, 1)]
    numbers = Simulator(scheduler(), seconds(1.0)).run(requests)
    # The second one comes while step 1 runs and begins when it ends; nothing happens until the third.
    assert numbers["ttft_ms"] == ms(*[round(1000 * x, 3) for x in (3.5 / 3, 1.0, 1.4, 1.49)])
    assert numbers["elapsed_s"] == 11.0
    assert numbers["steps"] == 4


def test_prefixes_are_shared_by_the_traces_ids() -> None:
    chat = [TraceRequest(10.0 * turn, 8 * turn + 3, 5, (7, 8, 9)[: turn + 1], 8.0) for turn in range(3)]
    numbers = Simulator(scheduler(), seconds(1.0)).run(chat)
    assert numbers["prefix_cache_queries"] == 3 + 11 + 19
    # Of three tokens nothing is a full block; the second turn's eight come back in the third.
    assert numbers["prefix_cache_hits"] == 8
    assert numbers["computed_tokens"] == 3 + 11 + 19 - 8 + 3 * 4
    numbers = Simulator(scheduler(), seconds(1.0), prefix_caching=False).run(chat)
    assert (numbers["prefix_cache_queries"], numbers["prefix_cache_hits"]) == (0, 0)


def test_samples_share_the_prompt() -> None:
    numbers = Simulator(scheduler(), seconds(1.0), n=2, prefix_caching=False).run([TraceRequest(0.0, 6, 4)])
    # The prompt once; then the fork computes the prompt's last token again, to draw its own first one.
    assert numbers["computed_tokens"] == 6 + 1 + 3 + 3
    assert numbers["output_tokens"] == 8
    assert numbers["cow_copies"] == 1
    assert numbers["ttft_ms"]["mean"] == 1000
    assert numbers["tpot_ms"]["mean"] == pytest.approx(1000 * 4 / 3, abs=0.01)


@pytest.mark.parametrize("swap_blocks", [0, 100])
def test_a_pool_too_small_for_all(swap_blocks: int) -> None:
    requests = [TraceRequest(0.0, 10, 30) for _ in range(6)]
    small = scheduler(16, max_num_seqs=6, swap_blocks=swap_blocks)
    numbers = Simulator(small, seconds(1.0), prefix_caching=False).run(requests)
    modes = numbers["preemptions_by_mode"]
    assert numbers["preemptions"] == sum(modes.values()) > 0
    assert modes["swap" if swap_blocks else "recompute"] > 0
    assert numbers["output_tokens"] == 180
    assert numbers["recomputed_tokens"] > 0
    assert (numbers["swap_transfers"] > 0) == (swap_blocks > 0)
    assert small.pool.num_held == 0
    assert numbers["kv_usage_peak"] <= 1


def test_a_request_that_never_fits() -> None:
    with pytest.raises(ValueError, match="10 blocks"):
        Simulator(scheduler(2), seconds(1.0)).run([TraceRequest(0.0, 10, 30)])


# ---- the real engine ----


def traffic(seed: int) -> tuple[list[list[int]], list[int], list[TraceRequest]]:
    """Prompts that share beginnings of whole blocks of 8, their output lengths, and the trace that says the same."""
    rng = random.Random(seed)
    chunks = [[rng.randrange(3, 200) for _ in range(8)] for _ in range(6)]
    prompts, outputs, trace = [], [], []
    for number in range(20):
        ids = [rng.randrange(2) + 2 * depth for depth in range(rng.randrange(4))]
        own = [rng.randrange(3, 200) for _ in range(rng.randrange(1, 30))]
        prompts.append([token for i in ids for token in chunks[i]] + own)
        outputs.append(rng.randrange(1, 42))
        names = (*ids, *range(100 * number + 100, 100 * number + 110))
        trace.append(TraceRequest(0.0, len(prompts[-1]), outputs[-1], names[: -(-len(prompts[-1]) // 8)], 8.0))
    return prompts, outputs, trace


@pytest.mark.parametrize(
    ("caching", "num_blocks", "swap_blocks", "n"),
    [(True, 0, 0, 1), (True, 18, 0, 1), (False, 18, 0, 1), (False, 18, 100, 1), (True, 20, 0, 3), (False, 20, 0, 3)],
)
def test_the_engine_counts_the_same(caching: bool, num_blocks: int, swap_blocks: int, n: int) -> None:
    prompts, outputs, trace = traffic(num_blocks + n)
    engine = golden_models.engine(
        "llama", block_size=8, num_blocks=num_blocks, max_num_seqs=8, prefix_caching=caching, swap_blocks=swap_blocks
    )
    params = [SamplingParams(n=n, max_tokens=most, ignore_eos=True, seed=i) for i, most in enumerate(outputs)]
    golden_models.run(engine, list(zip(prompts, params, strict=True)))
    tables = paged_tables(engine.sizes, (None,), keeps=caching)
    numbers = Simulator(
        Scheduler(tables, max_num_seqs=8, token_budget=64), seconds(0.001), prefix_caching=caching, n=n
    ).run(trace)
    counted = engine.metrics.as_dict()
    assert numbers["steps"] == counted["step_device_seconds_count"]
    assert numbers["computed_tokens"] == counted["iteration_tokens_total_sum"]
    assert numbers["kv_waste"] == round(engine.kv_waste, 5)
    for mode, count in numbers["preemptions_by_mode"].items():
        assert count == counted[f"num_preemptions{{mode={mode}}}"]
    same = ("prefix_cache_queries", "prefix_cache_hits", "recomputed_tokens", "cow_copies")
    assert {name: numbers[name] for name in same} == {name: counted[name] for name in same}
    assert numbers["output_tokens"] == counted["generation_tokens"] == n * sum(outputs)
    assert (numbers["prefix_cache_hits"] > 0) >= caching
    assert (numbers["preemptions"] > 0) == bool(num_blocks)


# ---- recorded plans ----


def recorded(swap_blocks: int) -> tuple[Engine, list[str]]:
    """A busy engine, tight of memory: samples, beams, prefixes, priorities of turn, an abort; and its record."""
    prompts, outputs, _ = traffic(5)
    engine = golden_models.engine(
        "llama", block_size=8, num_blocks=30, max_num_seqs=8, prefix_caching=True, swap_blocks=swap_blocks
    )
    file = io.StringIO()
    engine._scheduler = cast(Any, RecordingScheduler(engine._scheduler, file))
    requests: list[tuple[list[int], SamplingParams | BeamSearchParams]] = []
    for number, (prompt, most) in enumerate(zip(prompts, outputs, strict=True)):
        sampled = SamplingParams(n=1 + number % 3, max_tokens=most, seed=number, bad_words=[], min_tokens=most // 2)
        requests.append((prompt, BeamSearchParams(beam_width=3, max_tokens=most) if number % 5 == 2 else sampled))
    engine.add_request("aborted", prompts[0], SamplingParams(n=2, max_tokens=60))
    for _ in range(6):
        engine.step()
    engine.abort("aborted")
    golden_models.run(engine, requests, arrivals=[number // 2 for number in range(20)])
    return engine, file.getvalue().splitlines()


def fresh(engine: Engine) -> Scheduler:
    return Scheduler(paged_tables(engine.sizes, (None,)), max_num_seqs=8, token_budget=64)


@pytest.mark.parametrize("swap_blocks", [0, 100])
def test_a_record_replays_to_the_same_plans(swap_blocks: int) -> None:
    engine, lines = recorded(swap_blocks)
    counted = engine.metrics.as_dict()
    # There is something to replay.
    for name in ("num_preemptions", "prefix_cache_hits", "cow_copies"):
        assert counted[name] > 0
    assert (counted["num_preemptions{mode=swap}"] > 0) == (swap_blocks > 0)
    assert any('"fork": [' in line for line in lines)
    scheduler = fresh(engine)
    plans = replay(lines, scheduler)
    assert plans == sum('"plan"' in line for line in lines) > 50
    scheduler.pool.check_integrity([])
    assert scheduler.num_free_lanes == 8


def test_a_replay_sees_a_difference() -> None:
    engine, lines = recorded(0)
    plans = [number for number, line in enumerate(lines) if json.loads(line).get("plan", {}).get("decodes")]
    event = json.loads(lines[plans[7]])
    event["plan"]["decodes"][0][2] += 1
    changed = [*lines[: plans[7]], json.dumps(event), *lines[plans[7] + 1 :]]
    with pytest.raises(ValueError, match=f"line {plans[7] + 1}: planned"):
        replay(changed, fresh(engine))
    with pytest.raises(ValueError, match="planned"):  # not the scheduler that was recorded
        replay(lines, Scheduler(paged_tables(engine.sizes, (None,)), max_num_seqs=7, token_budget=64))


def test_a_simulation_is_recorded_too() -> None:
    _, _, trace = traffic(9)
    file = io.StringIO()
    numbers = Simulator(RecordingScheduler(scheduler(18, block_size=8, max_num_seqs=8), file), seconds(1.0)).run(trace)
    assert numbers["preemptions"] > 0
    assert replay(file.getvalue().splitlines(), scheduler(18, block_size=8, max_num_seqs=8)) >= numbers["steps"]


# ---- the command's settings ----


def write_trace(path: Path, requests: list[TraceRequest]) -> Path:
    names = {"prompt_tokens": "input_length", "output_tokens": "output_length", "hash_ids": "hash_ids"}
    rows = [
        {"timestamp": 1000 * request.arrival} | {name: getattr(request, field) for field, name in names.items()}
        for request in requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(**changes: Any) -> SimulationConfig:
    settings: dict[str, Any] = {"num_kv_blocks": 64, "step_time_model": "x", "block_size": 4, "max_num_seqs": 2}
    return SimulationConfig(**settings | changes)


def test_simulate_a_file(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [*TWO, TraceRequest(100.0, 4, 0)])
    small = config(max_num_batched_tokens=8, num_requests=2)
    numbers = simulate(trace, small, seconds(1.0), record_plans=tmp_path / "plans")
    assert numbers["ttft_ms"]["mean"] == 2000
    assert (numbers["clipped"], numbers["max_model_len"]) == (0, 14)
    assert replay((tmp_path / "plans").read_text().splitlines(), scheduler()) == 5
    assert simulate(trace, config(), seconds(1.0))["elapsed_s"] == 101.0
    assert simulate(trace, config(speed_up=4.0), seconds(1.0))["elapsed_s"] == 26.0
    assert simulate(trace, config(request_rate=0.04), seconds(1.0))["elapsed_s"] == 51.0
    at_once = simulate(trace, config(request_rate=float("inf"), length_scale=2.0), seconds(1.0))
    assert (at_once["prompt_tokens"], at_once["output_tokens"]) == (8 + 24 + 8, 6 + 4 + 2)
    clipped = simulate(trace, config(max_model_len=10), seconds(1.0))
    assert (clipped["clipped"], clipped["prompt_tokens"]) == (1, 4 + 8 + 4)


def test_layers_with_windows_hold_less(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [TraceRequest(0.0, 100, 20)])
    wide = simulate(trace, config(max_num_batched_tokens=8), seconds(1.0))
    narrow = simulate(trace, config(max_num_batched_tokens=8), seconds(1.0), windows=(8,))
    assert narrow["kv_usage_peak"] < wide["kv_usage_peak"] / 4


@pytest.mark.parametrize("kind", ["max", "pow2", "oracle"])
def test_reserving_lengths_wastes_what_paging_does_not(tmp_path: Path, kind: str) -> None:
    rng = random.Random(1)
    requests = [TraceRequest(i / 10, rng.randrange(5, 60), rng.randrange(5, 60)) for i in range(60)]
    trace = write_trace(tmp_path / "t.jsonl", requests)
    sizes: dict[str, Any] = {"num_kv_blocks": 128, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    paged = simulate(trace, config(**sizes), seconds(1.0))
    reserved = simulate(trace, config(**sizes, allocator=f"contiguous-{kind}"), seconds(1.0))
    assert reserved["output_tokens"] == paged["output_tokens"]
    assert reserved["kv_waste"] > paged["kv_waste"] + 0.1
    assert reserved["elapsed_s"] > paged["elapsed_s"]
    assert reserved["prefix_cache_hits"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_blocks": 0}, "--num-kv-blocks must be at least 1, got 0"),
        ({"block_size": 0}, "--block-size"),
        ({"max_num_batched_tokens": 1}, "--max-num-batched-tokens must be at least --max-num-seqs, 2"),
        ({"swap_space_blocks": -1}, "--swap-space-blocks"),
        ({"length_scale": 0.0}, "--length-scale must be above 0"),
        ({"length_scale": float("inf")}, "--length-scale must be finite"),
        ({"request_rate": -1.0}, "--request-rate must be above 0"),
        ({"request_rate": 1.0, "speed_up": 1.0}, "give one of them"),
        ({"allocator": "buddy"}, "--allocator must be one of paged, contiguous-max"),
        ({"allocator": "contiguous-max", "swap_space_blocks": 3}, "neither swap space"),
        ({"scheduling_policy": "lottery"}, "--scheduling-policy must be fcfs or priority"),
        ({"step_time_model": "fit"}, "say which with --model"),
    ],
    ids=str,
)
def test_wrong_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**changes)


def test_what_does_not_fit(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", TWO)
    with pytest.raises(UserError, match="--num-kv-blocks 3 is too few: one request of 14 tokens needs 4"):
        simulate(trace, config(num_kv_blocks=3), seconds(1.0))
    with pytest.raises(UserError, match=r"--record-plans .* cannot be written"):
        simulate(trace, config(), seconds(1.0), record_plans=tmp_path)


# ---- speed ----


def conversation(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """Requests with the Mooncake conversation trace's means: 3.4 a second, 12,035 and 343 tokens, turns of chats."""
    rng = random.Random(seed)
    chats: list[tuple[int, ...]] = []
    requests, now, fresh_id = [], 0.0, 0
    for _ in range(num_requests):
        now += rng.expovariate(3.4)
        before = rng.choice(chats) if chats and rng.random() < 0.5 else ()
        prompt = 512 * len(before) + min(100_000, round(rng.lognormvariate(8.3, 1.0)))
        own = -(-prompt // 512) - len(before)
        ids = (*before, *range(fresh_id, fresh_id + own))
        fresh_id += own
        chats = [*chats[-200:], ids[: prompt // 512]] if len(ids) < 150 else chats
        requests.append(TraceRequest(now, prompt, min(2000, 1 + round(rng.expovariate(1 / 343))), ids))
    return requests


@pytest.mark.nightly
def test_the_speed_of_a_simulation() -> None:
    """Half of what the 12,031 requests of the real trace may take: 60 seconds, so that a busy machine passes too."""
    requests = conversation(6000)
    model = StepTimeModel(
        StepFeatures(steps=4e-3, padded_tokens=8e-6, decode_rows=1e-5, decode_context=3e-8, prefill_attention=1e-10)
    )
    big = scheduler(200_000, block_size=16, max_num_seqs=256, token_budget=8192)
    began = time.process_time()
    numbers = Simulator(big, model).run(requests)
    assert time.process_time() - began < 60
    assert numbers["prefix_cache_hits"] > 0
    assert numbers["output_tokens"] == sum(request.output_tokens for request in requests)
