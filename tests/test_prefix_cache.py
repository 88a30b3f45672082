"""The prefix cache changes no bit: tokens and log-probabilities with it equal those without it.

Over every golden model in float32, and over two of them in bfloat16. The engines of a model share one device cache, so
what is expected is computed before an engine that keeps blocks comes into being.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from chain_model import write_chain_model
from golden_models import MODELS, blocks_of, engine, run

from pagedjax import BeamSearchParams, RequestOutput, SamplingParams
from pagedjax.config import EngineConfig
from pagedjax.engine import Engine
from pagedjax.loading import load_engine

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=20)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, seed=7, max_tokens=12, logprobs=5, repetition_penalty=1.2, frequency_penalty=0.3
)
FORKED = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=20, logprobs=5, presence_penalty=0.4)

Request = tuple[list[int], Any]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(320), k=count)


def bits(output: RequestOutput) -> object:
    """Everything that was computed, as exact numbers."""
    samples = [(c.token_ids, c.logprobs, c.cumulative_logprob) for c in output.outputs]
    return samples, output.prompt_logprobs


def one_by_one(under_test: Engine, requests: list[Request]) -> list[RequestOutput]:
    return [run(under_test, [request])[0] for request in requests]


def numbers(under_test: Engine) -> dict[str, float]:
    return under_test.metrics.as_dict()


@pytest.fixture(
    scope="module",
    params=[*((m, "float32") for m in MODELS), ("llama", "bfloat16"), ("gemma3_text", "bfloat16")],
    ids="-".join,
)
def model(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


def test_hits_of_every_length(model: tuple[str, str]) -> None:
    """A prompt of 50 tokens of which 0 to 50 are known, and prompts that are known whole, block by block or not."""
    prompt = tokens(1, 50)
    expected = [bits(o) for o in one_by_one(engine(*model), [(prompt, GREEDY), (prompt, DRAWN)])]
    for known in range(51):
        before: list[Request] = [(prompt[:known] + tokens(2, 5), GREEDY)] if known else []
        for params, wanted in zip((GREEDY, DRAWN), expected, strict=True):
            cached = engine(*model, prefix_caching=True)
            one_by_one(cached, before)
            (output,) = one_by_one(cached, [(prompt, params)])
            assert bits(output) == wanted, f"{known} tokens known"
            assert output.num_cached_tokens == known // BLOCK * BLOCK


def test_whole_prompts_that_are_known(model: tuple[str, str]) -> None:
    lengths = [1, 15, 16, 17, 31, 32, 33, 48, 64]
    requests = [(tokens(3, length), params) for length in lengths for params in (GREEDY, DRAWN)]
    expected = [bits(o) for o in one_by_one(engine(*model), requests)]
    cached = engine(*model, prefix_caching=True)
    one_by_one(cached, requests)
    outputs = one_by_one(cached, requests)
    assert [bits(o) for o in outputs] == expected
    for (prompt, _), output in zip(requests, outputs, strict=True):
        # All full blocks, but for the last token: the next one is drawn after it.
        assert output.num_cached_tokens == min(len(prompt) // BLOCK * BLOCK, len(prompt) - 1)


def test_turns_of_a_chat_come_back(model: tuple[str, str]) -> None:
    """Each turn's prompt is the one before, its answer and a question: answers are found as prompts are."""
    turns: list[Request] = [(tokens(4, 20), DRAWN)]
    plain, expected = engine(*model), []
    for turn in range(4):
        (output,) = one_by_one(plain, turns[-1:])
        expected.append(bits(output))
        turns.append((turns[-1][0] + output.outputs[0].token_ids + tokens(5 + turn, 3), DRAWN))
    cached = engine(*model, prefix_caching=True)
    outputs = one_by_one(cached, turns[:4])
    assert [bits(o) for o in outputs] == expected
    # The answer's last token was never an input.
    assert [o.num_cached_tokens for o in outputs] == [0, 16, 32, 48]


def crowd() -> list[Request]:
    """Requests that share prefixes of every kind, with forks."""
    rng, stem = random.Random(6), tokens(7, 60)
    requests: list[Request] = []
    for index in range(24):
        prompt = stem[: rng.choice([7, 16, 20, 32, 45, 48, 60])] + tokens(index, rng.choice([0, 1, 4, 16]))
        params = rng.choice([GREEDY, DRAWN, FORKED])
        requests.append((prompt[:70], params))
    return requests


def test_shared_while_running_and_within_a_round(model: tuple[str, str]) -> None:
    requests = crowd()
    expected = [bits(o) for o in one_by_one(engine(*model), requests)]
    cached = engine(*model, prefix_caching=True)
    assert [bits(o) for o in run(cached, requests)] == expected
    assert numbers(cached)["prefix_cache_hits"] > 300
    assert numbers(cached)["cow_copies"] > 0
    arrivals = [random.Random(8).randrange(30) for _ in requests]
    cached = engine(*model, prefix_caching=True, token_budget=24)
    assert [bits(o) for o in run(cached, requests, arrivals)] == expected


def test_after_eviction(model: tuple[str, str]) -> None:
    """A pool that holds a few prompts, asked for many in turn."""
    rng = random.Random(9)
    prompts = [tokens(100 + i, 40) for i in range(8)]
    requests = [(prompts[rng.randrange(8)][: rng.randrange(20, 41)], GREEDY) for _ in range(40)]
    expected = [bits(o) for o in one_by_one(engine(*model), requests)]
    cached = engine(*model, prefix_caching=True, num_blocks=blocks_of(model[0], 12 * BLOCK))
    assert [bits(o) for o in one_by_one(cached, requests)] == expected
    assert numbers(cached)["prefix_cache_hits"] > 200
    assert cached._scheduler.pool.num_evictions > 15


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("swap_blocks", [0, 7, 200])
def test_after_preemption(model: tuple[str, str], prefix_caching: bool, swap_blocks: int) -> None:
    requests = [(tokens(200 + i, 20 + i), SamplingParams(temperature=0, max_tokens=40, logprobs=5)) for i in range(10)]
    requests += [(tokens(300 + i, 30), FORKED) for i in range(4)]
    expected = [bits(o) for o in one_by_one(engine(*model), requests)]
    small = engine(
        *model, prefix_caching=prefix_caching, swap_blocks=swap_blocks, num_blocks=blocks_of(model[0], 8 * BLOCK)
    )
    assert [bits(o) for o in run(small, requests)] == expected
    counted = numbers(small)
    if model[0] not in ("mistral", "gemma3_text"):  # their windows are so narrow that hardly a block is missed
        assert counted["num_preemptions"] > 3
        assert (counted["num_preemptions{mode=swap}"] > 0) == bool(swap_blocks)


def test_beams_beside_the_cache(model: tuple[str, str]) -> None:
    stem = tokens(10, 40)
    searches: list[Request] = [
        (stem[:length], BeamSearchParams(beam_width=width, max_tokens=16))
        for length in (16, 33, 40)
        for width in (2, 5)
    ]
    expected = [bits(o) for o in one_by_one(engine(*model), searches)]
    cached = engine(*model, prefix_caching=True)
    one_by_one(cached, [(stem, GREEDY)])
    outputs = one_by_one(cached, searches)
    assert [bits(o) for o in outputs] == expected
    assert [o.num_cached_tokens for o in outputs] == [15, 15, 32, 32, 32, 32]
    assert [bits(o) for o in run(cached, searches)] == expected


def test_prompt_logprobs_are_computed_anew(model: tuple[str, str]) -> None:
    request = (tokens(11, 40), SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=5))
    (expected,) = one_by_one(engine(*model), [request])
    cached = engine(*model, prefix_caching=True)
    for _ in range(2):
        (output,) = one_by_one(cached, [request])
        assert bits(output) == bits(expected)
        assert output.num_cached_tokens == 0


def test_a_salt_keeps_strangers_apart() -> None:
    cached = engine("llama", prefix_caching=True)
    found = []
    for index, salt in enumerate([None, "a", "a", "b", None]):
        cached.add_request(str(index), tokens(12, 40), GREEDY, cache_salt=salt)
        outputs = []
        while cached.has_work:
            outputs += cached.step()
        found.append(outputs[-1].num_cached_tokens)
    assert found == [0, 0, 32, 0, 32]


def test_samples_hold_their_prompt_once(tmp_path: Path, step_cache: Path) -> None:
    """n = 8 on 512 tokens: one prefill, and no more slots than the prompt's and each sample's own."""
    model = write_chain_model(tmp_path / "model", {"a": {"a": 0.5, "b": 0.5}, "b": "a"}, max_model_len=600)
    config = EngineConfig(
        model=str(model.folder), dtype="float32", max_num_seqs=8, max_num_batched_tokens=128, num_kv_blocks=64
    )
    eight = load_engine(config)
    params = SamplingParams(n=8, seed=1, max_tokens=20, ignore_eos=True)
    eight.add_request("eight", [model.id("a")] * 512, params)
    most = 0
    while eight.has_work:
        eight.step()
        most = max(most, eight.blocks_held * BLOCK)
    assert 512 + 8 * 16 <= most <= 512 + 8 * (20 + BLOCK)
    # One prefill: each of the other seven looks at the prompt's last token for its first draw, and writes nothing.
    assert numbers(eight)["prompt_tokens"] == 512 + 7
    assert numbers(eight)["cow_copies"] == 0  # 512 tokens end with a block


def test_a_failed_row_leaves_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may count on blocks that a request was to fill whose row cannot be made."""
    prompt = tokens(14, 48)
    (expected,) = one_by_one(engine("llama"), [([*prompt, 1], GREEDY)])
    cached = engine("llama", prefix_caching=True)
    make = cached._row

    def fail(share: Any, row: Any, request: Any, generation: Any) -> Any:
        if request.request_id == "bad":
            raise RuntimeError("no such row")
        return make(share, row, request, generation)

    monkeypatch.setattr(cached, "_row", fail)
    cached.add_request("bad", [*prompt, 2], GREEDY)
    cached.add_request("good", [*prompt, 1], GREEDY)
    outputs: dict[str, RequestOutput] = {}
    while cached.has_work:
        outputs |= {o.request_id: o for o in cached.step() if o.finished}
    assert outputs["bad"].error
    assert outputs["good"].num_cached_tokens == 48
    assert outputs["good"].outputs[0].token_ids[-1:] == expected.outputs[0].token_ids[-1:]
