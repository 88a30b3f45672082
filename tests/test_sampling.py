"""The sampler against stored truth, NumPy, statistics, and itself in other company."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import config, cuts, sampling, vocab_tiles
from pagedjax.sampling import SampleOutput, SamplingInput, process_logits, sample, token_logprobs

Array = npt.NDArray[Any]
Fields = dict[str, Any]
"""Fields of a SamplingInput, as NumPy arrays."""

GOLDEN = Path(__file__).parent / "golden" / "sampling.json"
ALL = 0xFFFFFFFF
HISTORY = np.zeros((8, 16), np.int32)  # of eight rows that have no penalty


def plain(rows: int, vocab: int, bias: int = 4, **changes: Any) -> Fields:
    """Fields of a SamplingInput that asks for nothing, some of them changed (values broadcast over rows)."""
    fields: Fields = {
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "presence_penalty": np.zeros(rows, np.float32),
        "frequency_penalty": np.zeros(rows, np.float32),
        "repetition_penalty": np.ones(rows, np.float32),
        "prompt_len": np.full(rows, 4, np.int32),
        "history_len": np.full(rows, 12, np.int32),
        "key": np.stack([np.arange(rows), np.arange(rows) + 1], axis=1).astype(np.uint32),
        "position": np.full(rows, 12, np.int32),
        "bias_ids": np.full((rows, bias), -1, np.int32),
        "bias_values": np.zeros((rows, bias), np.float32),
        "allowed": np.full((rows, -(-vocab // 32)), ALL, np.uint32),
        "use_mask": np.zeros(rows, bool),
        "num_logprobs": np.full(rows, -1, np.int32),
    }
    for name, value in changes.items():
        fields[name][:] = value
    return fields


@jax.jit
def run(logits: jax.Array, s: SamplingInput, history: jax.Array) -> SampleOutput:
    return sample(logits, s, lambda row: history[row])


process = jax.jit(process_logits)


def probabilities(logits: Array, history: Array | None = None, **fields: Any) -> Array:
    if history is None:
        history = np.zeros((len(logits), 1), np.int32)
    z = np.asarray(process(logits, SamplingInput(**fields), history), np.float64)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


# ---- stored truth ----------------------------------------------------------------------------------------


def test_every_golden_entry() -> None:
    golden = json.loads(GOLDEN.read_text())
    entries = golden["entries"]
    rows, vocab = len(entries), golden["vocab"]
    fields = plain(rows, vocab, temperature=1.0)
    logits = np.array([[float(x) for x in golden["vectors"][e["vector"]]] for e in entries], np.float32)
    history = np.full((rows, 16), 7, np.int32)  # what lies past history_len must not matter
    for i, entry in enumerate(entries):
        for name, value in entry["params"].items():
            if name == "logit_bias":
                fields["bias_ids"][i, : len(value)] = [int(token) for token in value]
                fields["bias_values"][i, : len(value)] = list(value.values())
            else:
                fields[name][i] = value
        tokens = entry["prompt_tokens"] + entry["output_tokens"]
        history[i, : len(tokens)] = tokens
        fields["prompt_len"][i] = len(entry["prompt_tokens"])
        fields["history_len"][i] = len(tokens)
    got = probabilities(logits, history, **fields)
    checked = 0
    for entry, p in zip(entries, got, strict=True):
        if "threshold" in entry["flags"]:
            continue
        want = np.array(entry["probs"])
        if "tie" in entry["flags"]:
            p, want = np.sort(p), np.sort(want)
        np.testing.assert_allclose(p, want, rtol=0, atol=1e-6, err_msg=str(entry))
        checked += 1
    assert checked == 488


# ---- cuts against a sort ---------------------------------------------------------------------------------


def sorted_cut(z: Array, top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Kept ids by sorting in float64, and how near (in mass) the top_p decision was to falling otherwise."""
    z = z.astype(np.float64)
    p = np.exp(z - z.max())
    keep = p >= min_p
    if top_k:
        keep &= z >= np.sort(np.where(keep, z, -np.inf))[::-1][min(top_k, len(z)) - 1]
    p = np.where(keep, p, 0) / p[keep].sum()
    if top_p >= 1:
        return set(np.flatnonzero(keep)), 1.0
    order = np.lexsort((np.arange(len(z)), -z))
    before = np.cumsum(p[order]) - p[order]
    return set(order[(before < top_p) & keep[order]]), float(np.abs(before - top_p).min())


@pytest.mark.parametrize("vocab", [320, 12_345, 32_000])
@pytest.mark.parametrize("kind", ["sharp", "flat", "coarse", "two values"])
def test_cuts_keep_what_a_sort_keeps(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    asked = [(50, 1.0, 0.0), (1, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.1)]
    asked += [(200, 0.95, 0.01), (5000, 0.5, 0.0), (vocab, 0.99, 0.0), (9 * vocab, 1.0, 0.0), (7, 1.0, 0.5)]
    rows = len(asked)
    z = rng.normal(size=(rows, vocab)).astype(np.float32)
    if kind == "sharp":
        z *= 6
    if kind == "coarse":  # bfloat16 logits: many ties
        z = np.asarray(jnp.asarray(z * 3).astype(jnp.bfloat16).astype(jnp.float32))
    if kind == "two values":
        z = np.sign(z)
    top_k, top_p, min_p = (np.array(column) for column in zip(*asked, strict=True))
    got = probabilities(z, **plain(rows, vocab, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)) > 0
    for row, (k, p, m) in enumerate(asked):
        want, margin = sorted_cut(z[row], k, float(np.float32(p)), float(np.float32(m)))
        kept = set(np.flatnonzero(got[row]))
        if margin > 1e-5:
            assert kept == want, (k, p, m, len(kept), len(want))
        else:  # a decision of rounding: nearly as many, and still the best ones
            assert abs(len(kept) - len(want)) <= 2 + 0.002 * len(want)
            outside = np.delete(z[row], list(kept))
            assert not outside.size or z[row][list(kept)].min() >= outside.max()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        # XLA takes a subnormal number for zero on CPUs.
        st.floats(-300, 300, width=32, allow_subnormal=False)
        | st.sampled_from([0.0, 1.0, -np.inf, 3e38, -3e38, 1e-30]),
        min_size=24,
        max_size=24,
    ).filter(lambda values: max(values) > -np.inf),
    k=st.integers(1, 30),
)
def test_top_k_of_any_values(values: list[float], k: int) -> None:
    z = np.array([values], np.float32)
    fields = plain(1, 24, temperature=1.0, top_k=k)
    kept = np.isfinite(np.asarray(process(z, SamplingInput(**fields), np.zeros((1, 1), np.int32)))[0])
    threshold = np.sort(z[0])[::-1][min(k, 24) - 1]
    np.testing.assert_array_equal(kept, (z[0] >= threshold) & np.isfinite(z[0]))


# ---- the same bits in any company ------------------------------------------------------------------------


def mixed_requests(count: int, vocab: int, seed: int) -> Fields:
    """Rows with every option off and on in turn."""
    rng = np.random.default_rng(seed)

    def some(off: Any, low: float, high: float) -> Array:
        return np.where(rng.random(count) < 0.5, off, rng.uniform(low, high, count))

    fields = plain(
        count,
        vocab,
        temperature=some(0, 0.3, 1.5),
        top_k=some(0, 1, min(vocab, 2000)),
        top_p=some(1, 0.1, 0.99),
        min_p=some(0, 0.001, 0.2),
        presence_penalty=some(0, -1, 1),
        frequency_penalty=some(0, -1, 1),
        repetition_penalty=some(1, 0.8, 1.4),
        key=rng.integers(0, 2**32, (count, 2)),
        position=rng.integers(0, 1000, count),
        use_mask=rng.random(count) < 0.3,
        num_logprobs=rng.integers(-1, 21, count),
        bias_ids=np.where(rng.random((count, 4)) < 0.5, -1, rng.integers(0, vocab, (count, 4))),
        bias_values=rng.uniform(-5, 5, (count, 4)),
    )
    fields["allowed"][:] = rng.integers(0, 2**32, fields["allowed"].shape)
    return fields


@pytest.mark.parametrize(("vocab", "sizes"), [(320, (8, 16, 64)), (32_000, (8, 16, 64)), (262_144, (8, 16))])
def test_same_bits_whatever_the_neighbours(vocab: int, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(vocab)
    studied = 8
    mine = mixed_requests(studied, vocab, seed=1)
    my_logits = rng.normal(size=(studied, vocab)).astype(np.float32) * 4
    my_history = rng.integers(0, vocab, (studied, 16)).astype(np.int32)
    want = run(my_logits, SamplingInput(**mine), my_history)
    want_scores = jax.jit(token_logprobs)(my_logits, want.tokens)
    for rows in sizes:
        for neighbours in (plain(rows, vocab), mixed_requests(rows, vocab, seed=rows)):
            place = rng.permutation(rows)[:studied]
            logits = rng.normal(size=(rows, vocab)).astype(np.float32)
            history = rng.integers(0, vocab, (rows, 16)).astype(np.int32)
            fields = {name: values.copy() for name, values in neighbours.items()}
            logits[place], history[place] = my_logits, my_history
            for name, values in mine.items():
                fields[name][place] = values
            got = run(logits, SamplingInput(**fields), history)
            jax.tree.map(lambda a, b, place=place: np.testing.assert_array_equal(np.asarray(a)[place], b), got, want)
            targets = np.zeros(rows, np.int32)
            targets[place] = want.tokens
            scores = jax.jit(token_logprobs)(logits, targets)
            for a, b in zip(scores, want_scores, strict=True):
                np.testing.assert_array_equal(np.asarray(a)[place], b)


def test_one_row_alone_is_the_row_among_many() -> None:
    fields, vocab = mixed_requests(16, 320, seed=5), 320
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(16, vocab)).astype(np.float32) * 4
    history = rng.integers(0, vocab, (16, 16)).astype(np.int32)
    together = run(logits, SamplingInput(**fields), history)
    for i in range(16):
        alone = run(
            logits[i : i + 1],
            SamplingInput(**{k: v[i : i + 1] for k, v in fields.items()}),
            history[i : i + 1],
        )
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[0], b[i]), alone, together)


def test_all_rows_at_once_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that accelerators take, run here."""
    vocab, rows = 12_345, 16
    fields = mixed_requests(rows, vocab, seed=2)
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(rows, vocab)).astype(np.float32) * 4
    history = rng.integers(0, vocab, (rows, 16)).astype(np.int32)
    one_by_one = run(logits, SamplingInput(**fields), history)
    monkeypatch.setattr(sampling, "_by_group", lambda function, *arrays: function(*arrays))
    at_once = jax.jit(lambda *a: sample(a[0], a[1], lambda row: a[2][row]))(logits, SamplingInput(**fields), history)
    np.testing.assert_array_equal(at_once.tokens, one_by_one.tokens)
    np.testing.assert_array_equal(at_once.top_ids, one_by_one.top_ids)
    np.testing.assert_allclose(at_once.logprobs, one_by_one.logprobs, atol=1e-5)


def test_no_option_compiles_anything() -> None:
    logits = np.zeros((8, 320), np.float32)
    traces = []

    @jax.jit
    def counted(logits: jax.Array, s: SamplingInput) -> SampleOutput:
        traces.append(1)
        return sample(logits, s, lambda row: jnp.asarray(HISTORY)[row])

    counted(logits, SamplingInput(**plain(8, 320)))
    for seed in range(5):
        counted(logits, SamplingInput(**mixed_requests(8, 320, seed)))
    assert len(traces) == 1


def test_lowers_for_a_gpu_and_under_vmap() -> None:
    args = (np.zeros((8, 320), np.float32), SamplingInput(**plain(8, 320)), HISTORY)
    lowered = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in lowered
    assert "f64" not in lowered
    stacked = jax.tree.map(lambda a: np.stack([a, a]), args)
    out = jax.eval_shape(jax.vmap(run), *stacked)
    assert out.tokens.shape == (2, 8)


# ---- the draw --------------------------------------------------------------------------------------------


def draws(logits: Array, count: int, seed: int, **changes: Any) -> Array:
    """`count` draws from one row of logits, at positions 0 .. count - 1 of one request."""
    changes = {"temperature": 1.0, "key": [[0, seed]], "position": np.arange(count), **changes}
    fields = plain(count, len(logits), **changes)
    return np.asarray(run(np.tile(logits, (count, 1)), SamplingInput(**fields), np.zeros((count, 1), np.int32)).tokens)


@pytest.mark.parametrize(
    ("vocab", "changes"),
    [(700, {}), (700, {"temperature": 0.5}), (700, {"top_k": 30}), (700, {"top_p": 0.7})],
)
def test_draws_follow_the_distribution(vocab: int, changes: dict[str, Any]) -> None:
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 1.5
    count = 4096
    p = probabilities(logits[None], **plain(1, vocab, **{"temperature": 1.0, **changes}))[0]
    seen = np.bincount(draws(logits, count, seed=3, **changes), minlength=vocab)
    assert seen[p == 0].sum() == 0
    order = np.argsort(-p)
    cells = np.array_split(order[p[order] > 0], 20) if vocab > 100 else [[i] for i in order if p[i] * count > 5]
    expected = np.array([p[cell].sum() for cell in cells]) * count
    observed = np.array([seen[cell].sum() for cell in cells])
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_seed_and_position_decide_the_draw() -> None:
    logits = np.zeros(700, np.float32)
    first, again, other = draws(logits, 4096, 1), draws(logits, 4096, 1), draws(logits, 4096, 2)
    np.testing.assert_array_equal(first, again)
    assert (first == other).mean() < 0.005  # one in 700 agree by chance
    assert len(set(first.tolist())) > 690  # positions differ too
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.06


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("vocab", [5, 128, 1000, 32_000])
def test_extreme_numbers_draw_a_possible_token(u: float, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    weights = np.where(rng.random((8, vocab)) < 0.1, rng.random((8, vocab)), 0).astype(np.float32)
    weights[:, 3] = 1e-20
    weights[0] = 0
    tokens = np.asarray(sampling._draw(jnp.asarray(weights), jnp.full((8, 2), u, jnp.float32)))
    assert tokens[0] == -1
    assert all(weights[row, tokens[row]] > 0 for row in range(1, 8))


def test_bad_rows_stay_valid_and_alone() -> None:
    vocab, rows = 320, 8
    good = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)
    fields = plain(rows, vocab, temperature=1.0, top_p=0.9, top_k=40, num_logprobs=3)
    want = run(good, SamplingInput(**fields), HISTORY)
    bad = good.copy()
    bad[0], bad[1], bad[2] = np.nan, -np.inf, np.inf
    bad[3, 7], bad[4, 9], bad[5] = np.nan, np.inf, 3.4e38
    got = run(bad, SamplingInput(**fields), HISTORY)
    tokens = np.asarray(got.tokens)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert tokens[4] == 9
    assert tokens[3] != 7
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[6:], b[6:]), got, want)
    greedy = run(bad, SamplingInput(**plain(rows, vocab)), HISTORY).tokens
    assert ((np.asarray(greedy) >= 0) & (np.asarray(greedy) < vocab)).all()


def test_masks_leave_what_is_allowed() -> None:
    vocab, rows = 320, 8
    fields = plain(rows, vocab, temperature=[0, 0, 0, 0, 1, 1, 1, 1], use_mask=[True, False] * 4)
    fields["allowed"][:] = 0
    fields["allowed"][:, 150 // 32] = 1 << (150 % 32)
    logits = np.random.default_rng(1).normal(size=(rows, vocab)).astype(np.float32)
    tokens = np.asarray(run(logits, SamplingInput(**fields), HISTORY).tokens)
    assert (tokens[::2] == 150).all()
    np.testing.assert_array_equal(tokens[1:4:2], logits[1:4:2].argmax(axis=1))


def test_unused_bias_entries_touch_nothing() -> None:
    fields = plain(8, 320, bias_values=1e6)
    fields["bias_ids"][:] = [-1, 320, 321, 2**30]
    logits = np.random.default_rng(1).normal(size=(8, 320)).astype(np.float32)
    got = run(logits, SamplingInput(**fields), HISTORY).tokens
    np.testing.assert_array_equal(got, logits.argmax(axis=1))


# ---- log-probabilities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [16, 320, 32_000])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_are_of_the_raw_distribution(vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(8, vocab)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
    fields = plain(8, vocab, temperature=2.0, top_k=3, num_logprobs=[-1, 0, 1, 5, 20, 20, 20, 20], bias_values=9.0)
    fields["bias_ids"][:, 0] = np.arange(8)
    out = jax.tree.map(np.asarray, run(logits, SamplingInput(**fields), HISTORY))
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    rows = np.arange(8)
    chosen = exact[rows, out.tokens]
    np.testing.assert_allclose(out.logprobs[1:], chosen[1:], atol=1e-5)
    np.testing.assert_array_equal(out.rank[1:], (exact >= chosen[:, None]).sum(axis=1)[1:])
    assert out.logprobs[0] == 0
    assert out.rank[0] == 0
    assert (out.top_ids[:2] == -1).all()
    best = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    count = min(vocab, 20)
    np.testing.assert_array_equal(out.top_ids[2:, :count], best[2:])
    np.testing.assert_allclose(out.top_logprobs[2:, :count], np.take_along_axis(exact, best, 1)[2:], atol=1e-5)
    assert (out.top_ids[:, count:] == -1).all()
    assert np.isneginf(out.top_logprobs[:, count:]).all()
    logprob, rank, top_ids, top_logprobs = token_logprobs(jnp.asarray(logits), jnp.asarray(out.tokens))
    np.testing.assert_array_equal(np.asarray(rank)[1:], out.rank[1:])
    np.testing.assert_allclose(logprob, chosen, atol=1e-5)
    np.testing.assert_array_equal(top_ids[2:], out.top_ids[2:])
    np.testing.assert_allclose(top_logprobs[2:], out.top_logprobs[2:], atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 127, 129, 5000])
def test_argmax_takes_the_first_of_equals(vocab: int) -> None:
    z = np.random.default_rng(vocab).integers(0, 3, (16, vocab)).astype(np.float32)
    np.testing.assert_array_equal(vocab_tiles.argmax(jnp.asarray(z)), z.argmax(axis=1))
    np.testing.assert_array_equal(vocab_tiles.argmax(jnp.full((2, vocab), -jnp.inf)), [0, 0])


def test_ordinal_middle_is_between() -> None:
    ends = np.sort(
        np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)
        * 10.0 ** np.arange(-20, 30).repeat(10)[:, None]
    )
    middle = np.asarray(cuts._ordinal_middle(jnp.asarray(ends[:, 0]), jnp.asarray(ends[:, 1])))
    assert ((ends[:, 0] <= middle) & (middle < ends[:, 1])).all()


def test_the_reported_best_tokens_are_as_many_as_may_be_asked_for() -> None:
    assert sampling.TOP_LOGPROBS == config.MAX_LOGPROBS
