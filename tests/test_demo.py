"""The demo model against Hugging Face's reading of the same GGUF, and the first promise on a model of real size."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.checkpoint.demo import PACKAGE

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "demo.json").read_text())["cases"]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
pytestmark = pytest.mark.slow


def load(dtype: str) -> LLM:
    """With the user's own cache: converting the file and compiling take a minute."""
    pytest.importorskip(PACKAGE)
    return LLM("demo", dtype=dtype, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, num_kv_blocks=256)


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
