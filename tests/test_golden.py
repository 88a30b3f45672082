"""Every family against what Hugging Face computed, in every way that a request can be run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_models import GOLDEN, MAX_MODEL_LEN, MODELS, blocks_of, cases, engine, run

from pagedjax import (
    KVCache,
    PackedRow,
    RequestOutput,
    SamplingParams,
    StepPacker,
    StepShapes,
    TokenInput,
    init_kv_cache,
    load_model,
)
from pagedjax.models import Decoder

TOLERANCE = 2e-4  # float32: both sides round; the goldens' own noise is up to 1.4e-5
PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=5, prompt_logprobs=20)


def check(model: str, outputs: list[RequestOutput]) -> None:
    """Tokens equal, log-probabilities within the tolerance, over the prompt and over the continuation."""
    for case, output in zip(cases(model), outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == case.greedy
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        assert output.prompt_logprobs is not None
        for step, entry in enumerate(completion.logprobs):
            assert entry[case.greedy[step]].logprob == pytest.approx(case.greedy_logprobs[step], abs=TOLERANCE)
            found = [entry[token].logprob for token in case.top5_ids[step].tolist()]
            np.testing.assert_allclose(found, case.top5_logprobs[step], rtol=0, atol=TOLERANCE)
        wanted = case.logits - np.logaddexp.reduce(case.logits.astype(np.float64), axis=-1, keepdims=True)
        assert output.prompt_logprobs[0] is None
        for row, expected in enumerate(wanted[:-1]):
            position = case.logits_start + row + 1  # the logits after one token are of the next
            of_prompt = output.prompt_logprobs[position]
            assert of_prompt is not None
            assert len(of_prompt) >= 20
            for token, found_here in of_prompt.items():
                assert found_here.logprob == pytest.approx(expected[token], abs=TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
def test_logits(model: str) -> None:
    """The logits themselves, of every prompt token, with the prompt whole and in chunks of 16."""
    graphdef, params, config = load_model(str(GOLDEN / model), dtype="float32", show_progress=False)
    groups = config.cache_layout.num_groups
    tables = [[6 * group + block for block in (4, 1, 5)] for group in range(groups)]
    shapes = StepShapes.plan(config, num_blocks=6 * groups, token_budget=64)

    @jax.jit
    def logits(cache: KVCache, tokens: TokenInput) -> tuple[KVCache, jax.Array]:
        decoder: Decoder = nnx.merge(graphdef, params)
        hidden, cache = decoder(tokens.token_ids, tokens.positions, tokens.slots, cache, tokens.batch)
        return cache, decoder.logits(hidden)

    for case in cases(model):
        for chunk in (64, 16):
            cache, found, packer = init_kv_cache(config, 6 * groups), [], StepPacker(shapes)
            for start in range(0, len(case.prompt), chunk):
                part = case.prompt[start : start + chunk]
                row = PackedRow(0, start, part, tables, samples=False)
                cache, of_part = logits(cache, packer.pack([row], 0, jnp.zeros(8, jnp.int32)).tokens)
                found.append(np.asarray(of_part)[: len(part)])
            np.testing.assert_allclose(np.concatenate(found)[case.logits_start :], case.logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
@pytest.mark.parametrize("token_budget", [64, 16])
def test_by_the_gpu_kernels(model: str, token_budget: int) -> None:
    """In interpret mode: prompts whole and in chunks, and decode rows beside them."""
    interpreted = engine(model, attention_backend="pallas-interpret", token_budget=token_budget)
    check(model, run(interpreted, [(c.prompt, PARAMS) for c in cases(model)], arrivals=[0, 2, 5]))


@pytest.mark.parametrize("model", MODELS)
class TestGolden:
    @pytest.mark.parametrize("block_size", [8, 16, 32])
    def test_all_at_once(self, model: str, block_size: int) -> None:
        check(model, run(engine(model, block_size=block_size), [(c.prompt, PARAMS) for c in cases(model)]))

    def test_alone(self, model: str) -> None:
        outputs = [run(engine(model, max_num_seqs=1), [(c.prompt, PARAMS)])[0] for c in cases(model)]
        check(model, outputs)

    @pytest.mark.parametrize("block_size", [8, 16, 32])
    def test_chunked(self, model: str, block_size: int) -> None:
        chunked = engine(model, block_size=block_size, token_budget=16)
        check(model, run(chunked, [(c.prompt, PARAMS) for c in cases(model)]))
        assert max_step_tokens(chunked) <= 16

    @pytest.mark.parametrize("block_size", [8, 16, 32])
    def test_preempted(self, model: str, block_size: int) -> None:
        """A pool that holds one request of the greatest length, and not the three of them."""
        small = engine(model, block_size=block_size, num_blocks=blocks_of(model, MAX_MODEL_LEN, block_size))
        listed = [c for c in cases(model) for _ in range(3)]
        outputs = run(small, [(c.prompt, PARAMS) for c in listed])
        for start in range(3):
            check(model, outputs[start::3])
        if model not in ("mistral", "gemma3_text"):  # their windows are so narrow that hardly a block is missed
            assert small.metrics.as_dict()["num_preemptions"] > 0


def max_step_tokens(engine_under_test: object) -> int:
    """The upper bound of the fullest bucket of ``iteration_tokens_total``."""
    text = engine_under_test.metrics.render().decode()  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if "iteration_tokens_total_bucket" in line]
    counts = {line.split('le="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    total = counts.pop("+Inf")
    return int(min(float(bound) for bound, count in counts.items() if count == total))
