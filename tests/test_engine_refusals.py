"""Requests that can't be served: a ValueError that begins with the field's name, and nothing left behind."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chain_model import ChainModel
from small_engine import FLAGS, MAX_MODEL_LEN, TEXT, assert_empty, greedy, run, write_small_model

from pagedjax import LLM, SamplingParams
from pagedjax.engine import Engine


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> ChainModel:
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def sound() -> list[LLM]:
    """The engine that came well out of the test before, if it did."""
    return []


@pytest.fixture
def llm(sound: list[LLM], chain: ChainModel) -> Iterator[LLM]:
    llm = sound.pop() if sound else LLM(str(chain.folder), **FLAGS)
    yield llm
    assert_empty(llm.engine)
    sound.append(llm)


@pytest.fixture
def engine(llm: LLM) -> Engine:
    return llm.engine


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "prompt"),
    ([5, 100_000], {}, "prompt"),
    ([-1], {}, "prompt"),
    ([1.5], {}, "prompt"),
    (["a"], {}, "prompt"),
    ([None], {}, "prompt"),
    ([1] * (MAX_MODEL_LEN + 1), {"max_tokens": 0}, "prompt"),
    ([1] * MAX_MODEL_LEN, {"max_tokens": 1}, "prompt"),
    ([1] * MAX_MODEL_LEN, {"max_tokens": None}, "prompt"),
    ([1], {"max_tokens": MAX_MODEL_LEN}, "prompt"),
    ([1], {"stop_token_ids": [100_000]}, "stop_token_ids"),
    ([1], {"allowed_token_ids": [1, 100_000]}, "allowed_token_ids"),
    ([1], {"logit_bias": {100_000: 1.0}}, "logit_bias"),
]


@pytest.mark.parametrize(("prompt", "options", "name"), BAD)
def test_bad_requests_name_the_field_and_leave_nothing(
    engine: Engine, prompt: list[Any], options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        engine.add_request("bad", prompt, greedy(**options))
    assert not engine.has_work
    assert engine.num_waiting == 0


BAD_PARAMS: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", 1.0), ("best_of", 0), ("temperature", -0.1), ("temperature", 2.1),
    ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", 2**64),
    ("seed", "x"), ("stop", [""]), ("stop", [1]), ("stop", ["x"] * 17), ("stop_token_ids", [-1]),
    ("stop_token_ids", ["x"]), ("stop_token_ids", 5), ("stop", 5), ("bad_words", 5), ("min_tokens", -1),
    ("max_tokens", -1), ("max_tokens", True), ("logprobs", 21), ("prompt_logprobs", -1), ("logit_bias", [1]),
    ("logit_bias", {"1": 1}), ("logit_bias", {1: 101}), ("allowed_token_ids", []), ("allowed_token_ids", 7),
    ("bad_words", [""]), ("ignore_eos", 1), ("skip_special_tokens", None),
    ("include_stop_str_in_output", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_bad_parameters_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        SamplingParams(**{name: value})


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(ValueError, match=r"^min_tokens .*max_tokens"):
        SamplingParams(min_tokens=17)


def test_the_third_of_several_sequences_is_refused(
    engine: Engine, chain: ChainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, taken = engine._scheduler.add, 0

    def add(*sequences: Any) -> None:
        nonlocal taken
        taken += len(sequences)
        if taken > 2:
            raise ValueError("7 blocks wanted, the pool has 6")
        original(*sequences)

    monkeypatch.setattr(engine._scheduler, "add", add)
    with pytest.raises(ValueError, match="blocks wanted"):
        engine.add_request("bad", [chain.id("<go>")], greedy(n=4))
    assert not engine.has_work
    assert engine.num_waiting == 0
    assert not engine._generations


def test_an_id_that_is_in_use(engine: Engine, chain: ChainModel) -> None:
    engine.add_request("twice", [chain.id("<go>")], greedy())
    with pytest.raises(ValueError, match=r"^request_id 'twice'"):
        engine.add_request("twice", [chain.id("<loop>")], greedy())
    assert run(engine)["twice"].outputs[0].text == TEXT
    engine.add_request("twice", [chain.id("<cat>")], greedy())
    assert run(engine)["twice"].outputs[0].text.startswith("The cat")


def test_one_bad_prompt_among_several(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompt"):
        llm.generate([[1], [2], [100_000]], greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match=r"^params has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], [greedy()], use_tqdm=False)


def test_a_model_without_a_tokenizer(llm: LLM, chain: ChainModel, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(chain.folder / name, tmp_path)
    bare = LLM(str(tmp_path), **FLAGS)
    (out,) = bare.generate([chain.id("<go>")], greedy(logprobs=1), use_tqdm=False)
    assert out.outputs[0].token_ids == chain.follow("<go>")
    assert out.outputs[0].text == ""
    assert out.outputs[0].logprobs is not None
    assert out.outputs[0].logprobs[0][ord("H")].decoded_token is None
    for name, value in (("stop", "x"), ("bad_words", ["x"])):
        with pytest.raises(ValueError, match=rf"^{name} needs a tokenizer"):
            bare.generate([1], greedy(**{name: value}), use_tqdm=False)
    with pytest.raises(ValueError, match=r"^prompt is text"):
        bare.generate("x", use_tqdm=False)
    assert_empty(bare.engine)
