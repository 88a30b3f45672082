from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedjax.metrics import Metrics

OCCUPANCY: dict[str, Any] = {
    "running": 2,
    "waiting": 1,
    "blocks_held": 3,
    "blocks_cached": 4,
    "blocks_total": 12,
    "slots_filled": 40,
    "slots_held": 48,
}


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("tiny")
    metrics.observe_step(num_tokens=20, host_seconds=0.001, device_seconds=0.03)
    metrics.set_occupancy(**OCCUPANCY)
    metrics.observe_first_token(0.07)
    metrics.observe_token_gap(0.02)
    metrics.observe_token_gap(0.03)
    metrics.observe_plan(prompt_tokens=18, recomputed=30, queried=26, hits=8, copies=1)
    metrics.observe_generation_tokens(2)
    metrics.observe_preemption("recompute")
    metrics.observe_preemption("swap")
    metrics.observe_rejection("queue_full")
    metrics.set_compiled_shapes(4)
    metrics.count_compile_after_warmup()
    metrics.set_cache_config({"block_size": 16, "num_blocks": 12})
    metrics.observe_finished("length", 18, 3, 0.2, 0.01, 0.06, 0.13, 0.065)
    metrics.observe_finished("stop", 18, 1, 0.1, 0.01, 0.09, 0.0, None)
    return metrics


def test_as_dict(metrics: Metrics) -> None:
    numbers = metrics.as_dict()
    wanted = {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,
        "compiled_shapes": 4,
        "kv_cache_fill_perc": 40 / 48,
        "prompt_tokens": 18,
        "generation_tokens": 2,
        "recomputed_tokens": 30,
        "prefix_cache_queries": 26,
        "prefix_cache_hits": 8,
        "cow_copies": 1,
        "num_preemptions": 2,
        "admission_rejections{reason=queue_full}": 1,
        "compiles_after_warmup": 1,
        "kv_blocks": 12,
        "kv_blocks{state=free}": 5,
        "kv_blocks{state=cached}": 4,
        "kv_blocks{state=referenced}": 3,
        "request_success": 2,
        "request_success{finished_reason=stop}": 1,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.05,
        "request_time_per_output_token_seconds_count": 1,
        "iteration_tokens_total_sum": 20,
        "request_generation_tokens_sum": 4,
    }
    assert {name: numbers[name] for name in wanted} == pytest.approx(wanted)


def test_prometheus_reads_it(metrics: Metrics) -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics.render("vllm:").decode())}
    samples: dict[tuple[Any, ...], float] = {}
    for sample in (sample for family in families.values() for sample in family.samples):
        samples[(sample.name, *sorted(sample.labels.items()))] = sample.value
    name = ("model_name", "tiny")
    assert samples["vllm:generation_tokens_total", name] == 2
    for mode in ("recompute", "swap"):
        assert samples["vllm:num_preemptions_total", ("mode", mode), name] == 1
    assert samples["vllm:prefix_cache_hits_total", name] == 8
    assert samples["vllm:cache_config_info", ("block_size", "16"), name, ("num_blocks", "12")] == 1
    buckets = {
        le: samples["vllm:inter_token_latency_seconds_bucket", ("le", le), name] for le in ("0.01", "0.025", "+Inf")
    }
    assert buckets == {"0.01": 0, "0.025": 1, "+Inf": 2}
    assert samples["vllm:request_prompt_tokens_bucket", ("le", "20.0"), name] == 2
    assert families["vllm:iteration_tokens_total"].type == "histogram"
    assert not [sample for sample in samples if sample[0].endswith("_created")]
    assert b"pagedjax:generation_tokens_total" in metrics.render()


def test_a_bound_belongs_to_its_bucket() -> None:
    metrics = Metrics("tiny", max_model_len=10)
    for tokens in (1, 2, 10, 11):
        metrics.observe_finished("stop", tokens, 1, 0, 0, 0, 0, None)
    text = metrics.render().decode()
    for bound, count in (("1.0", 1), ("2.0", 2), ("5.0", 2), ("10.0", 3), ("+Inf", 4)):
        assert f'pagedjax:request_prompt_tokens_bucket{{le="{bound}",model_name="tiny"}} {count}.0' in text
    assert 'le="20.0",model_name="tiny"} ' not in text.split("request_prompt_tokens")[2].split("# HELP")[0]


def test_an_idle_engine_wastes_nothing() -> None:
    metrics = Metrics("tiny")
    metrics.set_occupancy(**OCCUPANCY | {"blocks_held": 0, "slots_filled": 0, "slots_held": 0})
    numbers = metrics.as_dict()
    assert (numbers["kv_cache_usage_perc"], numbers["kv_cache_fill_perc"]) == (0, 1)
