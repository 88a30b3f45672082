"""The first promise: a request's tokens and log-probabilities do not depend on its neighbours, to the bit.

On a CPU, in bfloat16 and in float32, over every golden model: alone, among sixteen others that come and go, cut into
chunks, preempted and computed again. ADR 2 says which shapes would break it.
"""

import random

import pytest
from golden_models import MAX_MODEL_LEN, MODELS, blocks_of, engine, run

from pagedjax import RequestOutput, SamplingParams
from pagedjax.engine import Engine

VOCAB = 320
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 33, 45, 48, 63, 64)


def target_requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(1)
    greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=20, prompt_logprobs=5)
    drawn = SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=7, max_tokens=24, logprobs=5,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
    )  # fmt: skip
    return [([rng.randrange(VOCAB) for _ in range(length)], params) for length in LENGTHS for params in (greedy, drawn)]


def neighbours() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(2)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            SamplingParams(
                temperature=rng.choice([0, 0.7, 1.5]), max_tokens=rng.randrange(1, 36), seed=i,
                top_p=rng.choice([1.0, 0.8]), top_k=rng.choice([0, 5]), logprobs=rng.choice([None, 3]),
                logit_bias=rng.choice([None, {5: 3.0}]), frequency_penalty=rng.choice([0.0, 0.5]),
            ),
        )
        for i in range(16)
    ]  # fmt: skip


def bits(output: RequestOutput) -> object:
    """Everything that was computed, as exact numbers."""
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, output.prompt_logprobs


@pytest.fixture(scope="module", params=[(m, d) for m in MODELS for d in ("bfloat16", "float32")], ids="-".join)
def alone(request: pytest.FixtureRequest) -> tuple[str, str, list[object]]:
    """Each target with the engine to itself."""
    model, dtype = request.param
    return model, dtype, [bits(run(engine(model, dtype), [r])[0]) for r in target_requests()]


def check(under_test: Engine, expected: list[object], *, others: bool, spread: int = 0) -> None:
    """The targets one after the other, each with the same bits as alone."""
    for index, (target, wanted) in enumerate(zip(target_requests(), expected, strict=True)):
        rng = random.Random(index)
        requests = [target, *neighbours()] if others else [target]
        order = list(range(len(requests)))
        rng.shuffle(order)
        arrivals = [rng.randrange(spread + 1) for _ in requests]
        outputs = run(under_test, [requests[i] for i in order], arrivals)
        assert bits(outputs[order.index(0)]) == wanted, f"target {index}"


def test_among_sixteen_others(alone: tuple[str, str, list[object]]) -> None:
    model, dtype, expected = alone
    check(engine(model, dtype), expected, others=True, spread=12)


def test_chunked(alone: tuple[str, str, list[object]]) -> None:
    model, dtype, expected = alone
    check(engine(model, dtype, token_budget=16), expected, others=False)
    check(engine(model, dtype, token_budget=24), expected, others=True, spread=5)


def test_preempted(alone: tuple[str, str, list[object]]) -> None:
    model, dtype, expected = alone
    small = engine(model, dtype, num_blocks=blocks_of(model, 2 * MAX_MODEL_LEN))
    check(small, expected, others=True)
    if model not in ("mistral", "gemma3_text"):  # their windows are so narrow that hardly a block is missed
        assert small.metrics.as_dict()["num_preemptions"] > 20


def test_other_block_size(alone: tuple[str, str, list[object]]) -> None:
    model, dtype, expected = alone
    if model not in ("llama", "gemma3_text"):
        pytest.skip("two models are enough: block size reaches the gather alone")
    check(engine(model, dtype, block_size=8), expected, others=False)
