"""The demo model against Hugging Face's reading of the same GGUF, and the first promise on a model of real size."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.checkpoint.demo import PACKAGE

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "demo.json").read_text())["cases"]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
pytestmark = pytest.mark.slow


def load(dtype: str, **flags: Any) -> LLM:
    """With the user's own cache: converting the file and compiling take a minute."""
    pytest.importorskip(PACKAGE)
    sizes = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 512}
    return LLM("demo", dtype=dtype, **sizes, **flags)


def test_float32_gives_hugging_faces_tokens() -> None:
    llm = load("float32")
    outputs = llm.generate([case["prompt"] for case in CASES.values()], GREEDY, use_tqdm=False)
    for case, output in zip(CASES.values(), outputs, strict=True):
        completion = output.outputs[0]
        assert output.prompt_token_ids == case["input_ids"]
        assert completion.token_ids == case["tokens"]
        assert completion.text == case["text"]
        assert completion.logprobs is not None
        found = [entry[token].logprob for entry, token in zip(completion.logprobs, case["tokens"], strict=True)]
        assert found == pytest.approx(
            case["logprobs"], abs=2e-3
        )  # logits of this model are up to 30 times the goldens'


def test_bfloat16_gives_the_same_bits_alone_and_together() -> None:
    llm = load("bfloat16")
    prompts = [case["prompt"] for case in CASES.values()]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    together = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
    for index, output in enumerate(together):
        expected = alone[index % len(prompts)]
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].logprobs == expected.logprobs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_prefix_cache_changes_no_bit(dtype: str) -> None:
    """A text asked for whole after each of its beginnings, forked, and searched; then after everything was evicted."""
    prompt = load_prompt()
    forked = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, ignore_eos=True, logprobs=2)
    searched = BeamSearchParams(beam_width=3, max_tokens=4)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    requests = [(prompt[:length], greedy) for length in (16, 17, 40, len(prompt))] * 2
    plain, cached = load(dtype, enable_prefix_caching=False), load(dtype)

    def everything(llm: LLM) -> list[object]:
        outputs = [llm.generate(ids, params, use_tqdm=False)[0] for ids, params in requests]
        outputs += llm.generate(prompt, forked, use_tqdm=False)
        outputs += llm.beam_search(prompt, searched, use_tqdm=False)
        return [(c.token_ids, c.logprobs, c.cumulative_logprob) for output in outputs for c in output.outputs]

    expected = everything(plain)
    assert everything(cached) == expected
    assert cached.metrics()["prefix_cache_hits"] > 150
    evicted = cached.engine._scheduler.pool.num_evictions
    cached.generate([[7 + i] * 300 for i in range(5)], SamplingParams(max_tokens=1), use_tqdm=False)
    assert cached.engine._scheduler.pool.num_evictions > evicted
    assert everything(cached) == expected
    assert plain.metrics()["prefix_cache_hits"] == 0


def load_prompt() -> list[int]:
    ids: list[int] = CASES["paragraph"]["input_ids"]
    return ids[:48]
