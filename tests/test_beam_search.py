"""Beam search on the engine gives Hugging Face's hypotheses, alone and in a crowd, and leaves nothing behind."""

import json
from typing import Any

import pytest
from golden_models import GOLDEN, MODELS, blocks_of, cases, engine, run

from pagedjax import BeamSearchParams, RequestOutput, SamplingParams
from pagedjax.engine import Engine


def beam_cases(model: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((GOLDEN / model / "beams.json").read_text())["cases"]
    return loaded


def request(model: str, case: dict[str, Any]) -> tuple[list[int], BeamSearchParams]:
    prompt = next(c.prompt for c in cases(model) if len(c.prompt) == case["prompt_len"])
    params = BeamSearchParams(
        beam_width=case["beam_width"],
        max_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )
    return prompt, params


def check(case: dict[str, Any], output: RequestOutput) -> None:
    assert [completion.token_ids for completion in output.outputs] == case["sequences"]
    for completion, score in zip(output.outputs, case["scores"], strict=True):
        assert completion.cumulative_logprob is not None
        found = completion.cumulative_logprob / len(completion.token_ids) ** case["length_penalty"]
        assert found == pytest.approx(score, rel=1e-5, abs=2e-4)
        ended = completion.token_ids[-1] in case["eos_token_ids"]
        assert completion.finish_reason == ("stop" if ended else "length")


def searched(under_test: Engine, model: str, case: dict[str, Any]) -> RequestOutput:
    return run(under_test, [request(model, case)])[0]


@pytest.mark.parametrize("model", MODELS)
class TestGoldenBeams:
    def test_alone(self, model: str) -> None:
        for case in beam_cases(model):
            check(case, searched(engine(model, eos_token_ids=tuple(case["eos_token_ids"])), model, case))

    def test_among_others(self, model: str) -> None:
        """Searches beside each other and beside samples, arriving one after the other, with prefixes shared."""
        listed = [case for case in beam_cases(model) if not case["eos_token_ids"]]
        others = [(c.prompt, SamplingParams(n=3, seed=i, max_tokens=20)) for i, c in enumerate(cases(model))]
        crowd = engine(model, prefix_caching=True)
        outputs = run(crowd, [*(request(model, case) for case in listed), *others], [*range(len(listed)), 0, 3, 6])
        for case, output in zip(listed, outputs, strict=False):
            check(case, output)
        assert crowd.metrics.as_dict()["cow_copies"] > 0

    @pytest.mark.parametrize("swap_blocks", [0, 200])
    def test_preempted(self, model: str, swap_blocks: int) -> None:
        """A pool that holds the widest search and not the others: beams lose their blocks and come back."""
        listed = [case for case in beam_cases(model) if not case["eos_token_ids"]]
        small = engine(model, num_blocks=blocks_of(model, 45) + 6 * blocks_of(model, 40), swap_blocks=swap_blocks)
        outputs = run(small, [request(model, case) for case in listed])
        for case, output in zip(listed, outputs, strict=True):
            check(case, output)


def test_what_cannot_be_searched_is_refused() -> None:
    small = engine("llama", num_blocks=12, max_num_seqs=5)
    with pytest.raises(ValueError, match="beam_width 6 is over the 5 sequences"):
        small.add_request("wide", [1, 2], BeamSearchParams(beam_width=6, max_tokens=4))
    with pytest.raises(ValueError, match=r"beam_width 5 needs 20 blocks of KV cache, and there are 12"):
        small.add_request("long", [1] * 20, BeamSearchParams(beam_width=5, max_tokens=40))
    with pytest.raises(ValueError, match="over the limit of 20"):
        engine("llama").add_request("wider", [1, 2], BeamSearchParams(beam_width=21, max_tokens=4))
    with pytest.raises(ValueError, match="over the limit of 96 tokens in all"):
        small.add_request("longer", [1] * 20, BeamSearchParams(beam_width=2, max_tokens=80))
    assert not small.has_work


def test_an_aborted_search_leaves_nothing() -> None:
    under_test = engine("llama")
    prompt, _ = request("llama", beam_cases("llama")[0])
    under_test.add_request("beams", prompt, BeamSearchParams(beam_width=4, max_tokens=30))
    for _ in range(12):
        assert under_test.step() == []
    assert under_test.blocks_held > 0
    under_test.abort("beams")
    assert under_test.blocks_held == 0
    while under_test.has_work:
        assert under_test.step() == []
