"""Exact texts, tokens and numbers through the whole engine: the chain model says what each has to be."""

import itertools
import math
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain_model import EOS, ChainModel
from small_engine import CAT, FLAGS, TEXT, greedy, write_small_model

from pagedjax import LLM, AsyncLLM, RequestOutput, SamplingParams
from pagedjax.request import CompletionOutput, Logprob, OutputCollector


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> ChainModel:
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def shared_llm(chain: ChainModel) -> LLM:
    return LLM(str(chain.folder), **FLAGS)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert shared_llm.engine.blocks_held == 0
    assert shared_llm.metrics()["compiles_after_warmup"] == 0


def one(llm: LLM, prompt: str | list[int], **options: Any) -> CompletionOutput:
    (output,) = llm.generate(prompt, greedy(**options), use_tqdm=False)
    assert output.finished
    return output.outputs[0]


def many(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids(chain: ChainModel, *tokens: str) -> list[int]:
    return [chain.id(token) for token in tokens]


# ---- where a text ends -----------------------------------------------------------------------------------


def test_the_whole_text_then_end_of_sequence(llm: LLM, chain: ChainModel) -> None:
    out = one(llm, "<go>")
    assert out.text == TEXT
    assert out.token_ids == chain.follow("<go>")
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert llm.tokenizer is not None
    assert out.text == llm.tokenizer.decode(out.token_ids)


@pytest.mark.parametrize("count", range(1, 40, 3))
def test_max_tokens_never_shows_half_a_character_early(llm: LLM, chain: ChainModel, count: int) -> None:
    out = one(llm, "<go>", max_tokens=count)
    assert out.token_ids == chain.follow("<go>", count)
    assert out.finish_reason == ("stop" if out.token_ids[-1] == chain.eos_id else "length")
    raw = b"".join(next(b for b, i in chain.ids.items() if i == t) for t in out.token_ids)
    assert out.text == raw.removesuffix(EOS.encode()).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("cat", "The ", 2),
        (["sat on the mat", "ND"], "The cat ", 4),
        ("END", "The cat sat on the mat. ", 5),
        (["e m", "mat"], "The cat sat on th", 3),
        ("The", "", 1),
        ("T", "", 1),
        (["t.", "sat on the mat. END of it"], "The cat sat on the ma", 4),
        ("it", "The cat sat on the mat. END of ", 6),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_tokens(llm: LLM, stop: Any, text: str, num_tokens: int, include: bool) -> None:
    out = one(llm, "<cat>", stop=stop, include_stop_str_in_output=include)
    stops = [stop] if isinstance(stop, str) else stop
    assert out.finish_reason == "stop"
    assert out.stop_reason in stops
    assert out.text == text + (str(out.stop_reason) if include else "")
    assert len(out.token_ids) == num_tokens


def test_a_stop_string_that_never_comes_whole_is_shown(llm: LLM) -> None:
    out = one(llm, "<cat>", stop=["of itself", "cats", "\ufffd"])
    assert (out.text, out.finish_reason, out.stop_reason) == ("".join(CAT), "stop", None)
    out = one(llm, "<cat>", stop=["on the mouse"], max_tokens=3)
    assert (out.text, out.finish_reason) == ("The cat sat on the m", "length")


def test_a_stop_string_of_a_split_character(llm: LLM) -> None:
    out = one(llm, "<go>", stop=["😀"])
    assert (out.text, out.stop_reason) == ("Hello, wörld ", "😀")
    out = one(llm, "<go>", stop=["ö", "d"], include_stop_str_in_output=True)
    assert (out.text, out.stop_reason) == ("Hello, wö", "ö")


def test_stop_token_ids(llm: LLM, chain: ChainModel) -> None:
    third = chain.id("loop:2 ")
    out = one(llm, "<loop>", stop_token_ids=[third, chain.eos_id])
    assert (out.text, out.finish_reason, out.stop_reason) == ("loop:0 loop:1 ", "stop", third)
    assert out.token_ids == ids(chain, "loop:0 ", "loop:1 ", "loop:2 ")
    out = one(llm, "<loop>", stop_token_ids=[third], include_stop_str_in_output=True)
    assert (out.text, out.stop_reason) == ("loop:0 loop:1 loop:2 ", third)
    # Where the end of sequence is ignored, it may still be named.
    out = one(llm, "<go>", stop_token_ids=[chain.eos_id], ignore_eos=True)
    assert (out.text, out.stop_reason) == (TEXT, chain.eos_id)


def test_ignore_eos(llm: LLM, chain: ChainModel) -> None:
    out = one(llm, "<go>", ignore_eos=True, max_tokens=60)
    said = chain.follow("<go>")
    assert out.token_ids == [*said, *[chain.eos_id] * (60 - len(said))]
    assert (out.text, out.finish_reason) == (TEXT, "length")


def test_the_prompt_may_end_in_half_a_character(llm: LLM, chain: ChainModel) -> None:
    said = chain.follow("<go>")
    at = said.index(chain.ids[b"\xc3"])
    out = one(llm, [chain.id("<go>"), *said[: at + 1]])
    assert out.text == TEXT[TEXT.index("ö") :]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_min_tokens(llm: LLM, chain: ChainModel, count: int) -> None:
    out = one(llm, "<early>", min_tokens=count)
    assert out.token_ids == [*ids(chain, "m") * count, chain.eos_id]
    assert (out.text, out.finish_reason, out.stop_reason) == ("m" * count, "stop", None)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_stop_tokens_may_not_come_before_min_tokens(llm: LLM, chain: ChainModel, count: int) -> None:
    p = chain.id("p")
    out = one(llm, "<pqr>", min_tokens=count, stop_token_ids=[p])
    assert out.token_ids == [*ids(chain, *"qrqrqr"[:count]), p]
    assert out.stop_reason == p


def test_stop_strings_do_not_count_before_min_tokens(llm: LLM) -> None:
    out = one(llm, "<loop>", stop=["loop:1", "loop:0 loop"], min_tokens=3)
    assert out.text == "loop:0 loop:1 loop:2 loop:3 loop:4 loop:5 loop:6 "
    assert out.stop_reason == "loop:0 loop"


def test_no_tokens_at_all(llm: LLM, chain: ChainModel) -> None:
    out = one(llm, "<go>", max_tokens=0)
    assert (out.text, out.token_ids, out.finish_reason) == ("", [], "length")
    long = [*ids(chain, "<go>")] * 128
    (scored,) = many(llm, [long], greedy(max_tokens=0, prompt_logprobs=1, n=2))
    assert [o.finish_reason for o in scored.outputs] == ["length", "length"]
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 128


def test_max_tokens_none_means_what_fits(llm: LLM, chain: ChainModel) -> None:
    out = one(llm, "<loop>", max_tokens=None)
    assert out.token_ids == chain.follow("<loop>", 127)
    assert out.finish_reason == "length"


def test_special_tokens_are_shown_on_demand(llm: LLM) -> None:
    assert one(llm, "<note>").text == "one two"
    assert one(llm, "<note>", skip_special_tokens=False).text == "one <|note|>two"
    assert one(llm, "<note>", skip_special_tokens=False, stop="|note").text == "one <"


# ---- which tokens may come -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "pqpqpqpq"),
        ({"bad_words": ["q"]}, "prprprpr"),
        ({"bad_words": ["qp"]}, "pqrpqrpq"),
        ({"bad_words": ["pqr", "qp"]}, "pqqrpqqr"),
        ({"bad_words": ["p", "qrq"]}, "qrrqrrqr"),
        ({"allowed": "qr"}, "qrqrqrqr"),
        ({"allowed": "r"}, "rrrrrrrr"),
        ({"allowed": "pr", "bad_words": ["pr"]}, "pppppppp"),
        ({"bias": {"r": 1.5}}, "prprprpr"),
        ({"bias": {"p": -100.0}}, "qrqrqrqr"),
        ({"bias": {"q": -3.0}, "bad_words": ["rp"]}, "prrrrrrr"),
        ({"presence_penalty": 2.0}, "pqrpqpqp"),
        ({"frequency_penalty": 1.0}, "pqrpqpqr"),
    ],
)
def test_constraints(llm: LLM, chain: ChainModel, options: dict[str, Any], said: str) -> None:
    options = dict(options)
    if "allowed" in options:
        options["allowed_token_ids"] = ids(chain, *options.pop("allowed"))
    if "bias" in options:
        options["logit_bias"] = {chain.id(t): v for t, v in options.pop("bias").items()}
    expected = "".join(slow_choice(chain, options, len(said)))
    assert one(llm, "<pqr>", max_tokens=len(said), **options).text == expected
    if "penalty" not in "".join(options):
        assert expected == said


def slow_choice(chain: ChainModel, options: dict[str, Any], count: int) -> Iterator[str]:
    """Greedy choice among p, q and r, worked out anew for each token."""
    said, last = "", "<pqr>"
    for _ in range(count):
        scores = {t: float(chain.log_probs[chain.id(last)][chain.id(t)]) for t in "pqr"}
        for t in "pqr":
            scores[t] += (options.get("logit_bias") or {}).get(chain.id(t), 0.0)
            allowed = options.get("allowed_token_ids")
            banned = any((said + t).endswith(word) for word in options.get("bad_words", ()))
            if banned or (allowed and chain.id(t) not in allowed):
                scores[t] = -math.inf
            scores[t] -= options.get("frequency_penalty", 0.0) * said.count(t)
            scores[t] -= options.get("presence_penalty", 0.0) * (t in said)
        last = max(scores, key=scores.__getitem__)
        said += last
        yield last


# ---- log-probabilities -----------------------------------------------------------------------------------


def check_entry(chain: ChainModel, entry: dict[int, Logprob], before: int, token: int, top: int) -> None:
    """One position's log-probabilities against the chain model's own."""
    row = chain.log_probs[before]
    assert entry[token].rank == int((row >= row[token]).sum())
    best = np.sort(row)[::-1][:top]
    found = sorted((e for e in entry.values() if e.rank <= top), key=lambda e: e.rank)
    np.testing.assert_allclose([e.logprob for e in found][:top], best[: len(found)], atol=2e-5)
    assert len(entry) in (max(top, 1), top + 1)
    for token_id, of in entry.items():
        assert of.logprob == pytest.approx(float(row[token_id]), abs=2e-5)
    spelled = next(b for b, i in chain.ids.items() if i == token).decode("utf-8", "replace")
    assert entry[token].decoded_token == spelled


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(llm: LLM, chain: ChainModel, top: int) -> None:
    prompt = ids(chain, "<dice>")
    (output,) = many(llm, [prompt], SamplingParams(temperature=1.5, seed=7, max_tokens=30, logprobs=top))
    out = output.outputs[0]
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.token_ids)
    for (before, token), entry in zip(pairwise([*prompt, *out.token_ids]), out.logprobs, strict=True):
        check_entry(chain, entry, before, token, top)
    total = sum(e[t].logprob for e, t in zip(out.logprobs, out.token_ids, strict=True))
    assert out.cumulative_logprob == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize(("length", "top"), [(1, 3), (2, 0), (63, 1), (65, 20), (120, 2)])
def test_prompt_logprobs_are_the_models_own(llm: LLM, chain: ChainModel, length: int, top: int) -> None:
    said = chain.follow("<go>")
    prompt = [chain.id("<go>"), *(said * 4)][:length]
    (output,) = many(llm, [prompt], greedy(max_tokens=1, prompt_logprobs=top))
    assert output.prompt_token_ids == prompt
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == length
    first, *rest = output.prompt_logprobs
    assert first is None
    for (before, token), entry in zip(pairwise(prompt), rest, strict=True):
        assert entry is not None
        check_entry(chain, entry, before, token, top)


def test_logprobs_are_of_the_raw_distribution(llm: LLM, chain: ChainModel) -> None:
    out = one(llm, "<pqr>", max_tokens=1, logprobs=1, logit_bias={chain.id("p"): -100.0}, top_k=1)
    assert out.logprobs is not None
    assert out.text == "q"
    assert {t: (round(math.exp(e.logprob), 4), e.rank) for t, e in out.logprobs[0].items()} == {
        chain.id("q"): (0.3, 2),
        chain.id("p"): (0.6, 1),
    }


# ---- samples and seeds -----------------------------------------------------------------------------------


def dice(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 24, "seed": 11} | options)


def test_a_sample_does_not_depend_on_n(llm: LLM) -> None:
    runs = {n: many(llm, ["<dice>"], dice(n=n))[0].outputs for n in (1, 2, 4, 12)}
    for n, outputs in runs.items():
        assert [out.index for out in outputs] == list(range(n))
        assert [out.token_ids for out in outputs] == [out.token_ids for out in runs[12][:n]]
    assert len({tuple(out.token_ids) for out in runs[12]}) == 12


def test_a_seed_gives_the_same_alone_and_among_others(llm: LLM) -> None:
    alone = [many(llm, ["<dice>"], dice(seed=seed, logprobs=2))[0].outputs[0] for seed in range(12)]
    params = [dice(seed=seed, logprobs=2) for seed in range(12)]
    assert [out.outputs[0] for out in many(llm, ["<dice>"] * 12, params)] == alone
    others = [dice(seed=None, max_tokens=40), greedy(max_tokens=90), dice(n=3, top_p=0.5, min_p=0.1)]
    mixed = many(llm, ["<dice>", "<loop>", "<dice>", *["<dice>"] * 12], [*others, *params])
    assert [out.outputs[0] for out in mixed[3:]] == alone


def test_without_a_seed_requests_differ(llm: LLM) -> None:
    outs = many(llm, ["<dice>"] * 8, dice(seed=None))
    assert len({tuple(out.outputs[0].token_ids) for out in outs}) == 8


def test_the_draw_follows_the_odds(llm: LLM, chain: ChainModel) -> None:
    draws = [out for seed in range(3) for out in many(llm, ["<dice>"], dice(n=128, seed=seed, max_tokens=1))]
    tokens = [out.token_ids[0] for draw in draws for out in draw.outputs]
    for face in "abcde":
        share = math.exp(chain.log_probs[chain.id("<dice>")][chain.id(face)])
        spread = math.sqrt(share * (1 - share) / len(tokens))
        assert abs(tokens.count(chain.id(face)) / len(tokens) - share) < 4 * spread


def test_best_of_picks_from_the_samples_of_n(llm: LLM) -> None:
    samples = many(llm, ["<dice>"], dice(n=6, logprobs=0))[0].outputs
    best = sorted(samples, key=lambda out: -(out.cumulative_logprob or 0.0))
    (picked,) = many(llm, ["<dice>"], dice(n=2, best_of=6))
    assert [out.index for out in picked.outputs] == [0, 1]
    assert [out.token_ids for out in picked.outputs] == [out.token_ids for out in best[:2]]
    assert [out.text for out in picked.outputs] == [out.text for out in best[:2]]
    assert [out.logprobs for out in picked.outputs] == [None, None]
    (told,) = many(llm, ["<dice>"], dice(n=2, best_of=6, logprobs=3))
    assert [out.token_ids for out in told.outputs] == [out.token_ids for out in best[:2]]
    for out, of in zip(told.outputs, best, strict=False):
        assert out.cumulative_logprob == of.cumulative_logprob
        assert out.logprobs is not None
        assert len(out.logprobs) == len(out.token_ids)


def test_greedy_samples_are_equal(llm: LLM, chain: ChainModel) -> None:
    (output,) = many(llm, ["<go>"], greedy(n=5))
    assert [out.text for out in output.outputs] == [TEXT] * 5
    assert [out.token_ids for out in output.outputs] == [chain.follow("<go>")] * 5


# ---- everything at once ----------------------------------------------------------------------------------


def everything(chain: ChainModel) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds; together they are far more than the pool holds."""
    pqr, go = ids(chain, "<pqr>"), ids(chain, "<go>")
    r = chain.id("r")
    return [
        (go, greedy(logprobs=1)),
        (go * 60, greedy(max_tokens=60, prompt_logprobs=1, logprobs=1)),
        (ids(chain, "<cat>"), greedy(stop=["END", "of"])),
        (ids(chain, "<loop>"), greedy(max_tokens=70, stop_token_ids=[r])),
        (ids(chain, "<dice>"), dice(n=3, max_tokens=40, logprobs=2)),
        (pqr, greedy(max_tokens=40, bad_words=["qp", "rr"])),
        (pqr, greedy(max_tokens=50, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.1)),
        (pqr, dice(max_tokens=50, frequency_penalty=0.5, top_k=2, n=2)),
        (ids(chain, "<dice>"), dice(n=2, best_of=3, seed=5)),
        (pqr, greedy(max_tokens=30, logit_bias={r: 1.0}, repetition_penalty=1.5)),
        (ids(chain, "<early>"), greedy(min_tokens=30)),
        (ids(chain, "<n3>", "<n4>") * 50, greedy(max_tokens=28)),
        (pqr, dice(max_tokens=30, allowed_token_ids=[r, chain.id("q")], min_tokens=3)),
        (go * 100, greedy(max_tokens=0, prompt_logprobs=0)),
    ]


def test_preempted_requests_give_the_same(llm: LLM, chain: ChainModel) -> None:
    listed = everything(chain)
    alone = [many(llm, [prompt], params)[0] for prompt, params in listed]
    before = llm.metrics()
    together = many(llm, [prompt for prompt, _ in listed], [params for _, params in listed])
    after = llm.metrics()
    assert after["num_preemptions"] - before["num_preemptions"] > 3
    for one_, other in zip(alone, together, strict=True):
        assert other.outputs == one_.outputs
        assert other.prompt_logprobs == one_.prompt_logprobs


@pytest.fixture
async def async_llm(chain: ChainModel) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(str(chain.folder), **FLAGS)
    yield engine
    await engine.shutdown()


async def test_streamed_deltas_joined_are_the_whole(llm: LLM, chain: ChainModel, async_llm: AsyncLLM) -> None:
    for prompt, params in everything(chain):
        (whole,) = many(llm, [prompt], params)
        collector, texts = OutputCollector(), [""] * params.n
        async for delta in async_llm.generate(prompt, params, delta=True):
            for out in delta.outputs:
                texts[out.index] += out.text
            collector.add(delta)
        last = collector.snapshot()
        assert last.finished
        assert last.outputs == whole.outputs
        assert last.prompt_logprobs == whole.prompt_logprobs
        assert texts == [out.text for out in whole.outputs]
        grown: list[RequestOutput] = [out async for out in async_llm.generate(prompt, params)]
        assert grown[-1].outputs == whole.outputs
        for earlier, later in pairwise(grown):
            for old, new in zip(earlier.outputs, later.outputs, strict=False):
                assert new.index != old.index or new.text.startswith(old.text)
                assert new.index != old.index or new.token_ids[: len(old.token_ids)] == old.token_ids


async def test_streamed_text_holds_no_part_of_a_stop_string(async_llm: AsyncLLM) -> None:
    shown = [out.outputs[0].text async for out in async_llm.generate("<cat>", greedy(stop="at. END of"))]
    assert shown[-1] == "The cat sat on the m"
    assert all(shown[-1].startswith(text) for text in shown)
    shown = [out.outputs[0].text async for out in async_llm.generate("<go>", greedy())]
    assert shown[-1] == TEXT
    assert not any("\ufffd" in text for text in shown)


def test_score(llm: LLM, chain: ChainModel) -> None:
    ids = [chain.id(token) for token in ("<dice>", "a", "c", "b", "e", "a")]
    expected = [float(chain.log_probs[before, after]) for before, after in itertools.pairwise(ids)]
    assert llm.score(ids) == pytest.approx(expected, abs=1e-4)
    assert llm.score(ids) == llm.score(tuple(ids))
    assert llm.score(ids[:1]) == []
    with pytest.raises(ValueError, match="prompt has no tokens"):
        llm.score([])
    with pytest.raises(ValueError, match="prompt has 200 tokens"):
        llm.score([1] * 200)
