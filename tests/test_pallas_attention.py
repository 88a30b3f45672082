"""The paged attention kernels, interpreted on the CPU, against their references."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import triton as plgpu
from kernel_cases import (
    CASES,
    ROWS,
    AttentionCase,
    Batch,
    Contents,
    contents,
    decode_batches,
    empty_batch,
    expect_close,
    poisoned,
    ragged_batches,
    same_bits,
)

from pallas_kernels import reference
from pallas_kernels.kv_tiles import LOG2_E, MASKED, Softmax
from pallas_kernels.paged_decode import paged_decode, reduce_segments
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.tuning import DecodeTiles, PrefillTiles

Jitted = Callable[..., jax.Array]
EXAMPLES = settings(max_examples=20, deadline=None)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def _arrays(case: AttentionCase, of: Contents, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What all kernels and references take: K, V and block tables; and what a case may lack."""
    window = np.int32(batch.window) if case.window else None
    optional = {"window": window, "sinks": of.sinks, "k_scales": of.k_scales, "v_scales": of.v_scales}
    return (of.k, of.v, batch.block_tables), optional


@functools.cache
def _ragged(case: AttentionCase) -> Jitted:
    tiles = PrefillTiles(case.queries, case.tokens, num_warps=4, num_stages=2)
    return jax.jit(functools.partial(ragged_paged_attention, tiles=tiles, interpret=True, **case.options))


@functools.cache
def _decode(case: AttentionCase) -> Jitted:
    tiles = DecodeTiles(case.tokens, case.segments, num_warps=4, num_stages=2)
    return jax.jit(functools.partial(paged_decode, tiles=tiles, interpret=True, **case.options))


@functools.cache
def _reference(case: AttentionCase) -> Jitted:
    return jax.jit(functools.partial(reference.ragged_paged_attention, **case.options))


@functools.cache
def _decode_reference(case: AttentionCase) -> Jitted:
    return jax.jit(functools.partial(reference.paged_decode, **case.options))


def run_ragged(case: AttentionCase, of: Contents, batch: Batch) -> np.ndarray:
    """Queries of nobody are NaN."""
    arrays, optional = _arrays(case, of, batch)
    q = of.q.copy()
    q[batch.cu_q_lens[-1] :] = np.nan
    num_decodes = np.int32(batch.num_decodes)
    return np.asarray(_ragged(case)(q, *arrays, batch.cu_q_lens, batch.kv_lens, num_decodes, **optional))


def run_decode(case: AttentionCase, of: Contents, batch: Batch, out: np.ndarray | None) -> np.ndarray:
    """Queries of nobody are NaN."""
    arrays, optional = _arrays(case, of, batch)
    q = of.q.copy()
    q[case.sequences :] = np.nan
    q[: case.sequences][batch.kv_lens == 0] = np.nan
    return np.asarray(_decode(case)(q, *arrays, batch.kv_lens, **optional, out=out))


def ragged_expected(case: AttentionCase, batch: Batch) -> np.ndarray:
    clean = contents(case)
    arrays, optional = _arrays(case, clean, batch)
    return np.asarray(_reference(case)(clean.q, *arrays, batch.cu_q_lens, batch.kv_lens, **optional))


def decode_expected(case: AttentionCase, batch: Batch) -> np.ndarray:
    clean = contents(case)
    arrays, optional = _arrays(case, clean, batch)
    return np.asarray(_decode_reference(case)(clean.q[: case.sequences], *arrays, batch.kv_lens, **optional))


def ragged_poison(case: AttentionCase, batch: Batch) -> Contents:
    """NaN wherever `ragged_paged_attention` must not look.

    That is past each context, in blocks of nobody, in the contexts of sequences that are not its own, and in the tiles
    before the one in which the first query's window begins. That tile it reads from its start, for the mask of what is
    loaded knows one bound only: the slots of it that lie before the window are read, weigh nothing, and must be finite,
    as all that was ever written is.
    """
    first_position = batch.kv_lens - batch.q_lens
    oldest = np.maximum(first_position - batch.window + 1, 0) if case.window else np.zeros_like(first_position)
    is_own = (np.arange(case.sequences) >= batch.num_decodes) & (batch.q_lens > 0)
    return poisoned(case, batch, np.where(is_own, oldest // case.tokens * case.tokens, batch.kv_lens))


def decode_poison(case: AttentionCase, batch: Batch) -> Contents:
    """NaN wherever `paged_decode` must not look: in every slot of no visible token, before the window too."""
    oldest = np.maximum(batch.kv_lens - batch.window, 0) if case.window else np.zeros_like(batch.kv_lens)
    return poisoned(case, batch, oldest)


@every_case
def test_ragged_paged_attention(case: AttentionCase) -> None:
    @EXAMPLES
    @given(ragged_batches(case))
    def check(batch: Batch) -> None:
        got = run_ragged(case, ragged_poison(case, batch), batch)
        begin, end = batch.cu_q_lens[[batch.num_decodes, -1]]
        expect_close(got[begin:end], ragged_expected(case, batch)[begin:end], case.dtype)
        assert (got[end:] == 0).all()

    check()


@every_case
def test_paged_decode(case: AttentionCase) -> None:
    before = np.random.default_rng(1).standard_normal((ROWS, case.heads, case.head_dim)).astype(jnp.dtype(case.dtype))

    @EXAMPLES
    @given(decode_batches(case))
    def check(batch: Batch) -> None:
        got = run_decode(case, decode_poison(case, batch), batch, before)
        is_own = np.arange(ROWS) < case.sequences
        is_own[: case.sequences] &= batch.kv_lens > 0
        expected = decode_expected(case, batch)[is_own[: case.sequences]]
        expect_close(got[is_own], expected, case.dtype)
        assert same_bits(got[~is_own], before[~is_own])

    check()


@every_case
def test_nothing_to_do(case: AttentionCase) -> None:
    """Every row is empty: zeros from the one kernel, nothing written by the other, though the whole cache is NaN."""
    batch = empty_batch(case)
    of = poisoned(case, batch, batch.kv_lens)
    before = contents(case).q
    assert (run_ragged(case, of, batch) == 0).all()
    assert same_bits(run_decode(case, of, batch, before), before)


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_decode_without_out(case: AttentionCase) -> None:
    """Rows of no sequence are 0 then."""
    kv_lens = np.arange(case.sequences, dtype=np.int32) * 17
    batch = Batch(empty_batch(case).block_tables, np.arange(case.sequences + 1), kv_lens, case.sequences, 9)
    got = run_decode(case, contents(case), batch, None)
    expect_close(got[1 : case.sequences], decode_expected(case, batch)[1:], case.dtype)
    assert (got[0] == 0).all()
    assert (got[case.sequences :] == 0).all()


@pytest.mark.parametrize("case", [CASES[4], CASES[6], CASES[8], CASES[14]], ids=str)
def test_a_step_of_both(case: AttentionCase) -> None:
    """Decodes by one kernel and chunks by the other, into the same rows."""

    @EXAMPLES
    @given(ragged_batches(case))
    def check(batch: Batch) -> None:
        of, expected = contents(case), ragged_expected(case, batch)
        chunks = run_ragged(case, of, batch)
        is_decode = np.arange(case.sequences) < batch.num_decodes
        decodes = Batch(
            batch.block_tables, batch.cu_q_lens, np.where(is_decode, batch.kv_lens, 0), batch.num_decodes, batch.window
        )
        got = run_decode(case, of, decodes, chunks)
        expect_close(got, expected, case.dtype)

    check()


@every_case
def test_poison(case: AttentionCase) -> None:
    """What no query sees changes no bit; for what may be read unseen, see `ragged_poison`."""

    @settings(max_examples=4, deadline=None)
    @given(ragged_batches(case), decode_batches(case))
    def check(ragged: Batch, decode: Batch) -> None:
        begin = ragged.cu_q_lens[ragged.num_decodes]
        clean, dirty = (run_ragged(case, of, ragged)[begin:] for of in (contents(case), ragged_poison(case, ragged)))
        assert same_bits(clean, dirty)
        before = contents(case).q
        clean, dirty = (run_decode(case, of, decode, before) for of in (contents(case), decode_poison(case, decode)))
        assert same_bits(clean, dirty)

    check()


_SEGMENTS = [  # sequences, heads, segments, head_dim, dtype of the output
    (1, 1, 1, 64, "float32"),
    (3, 4, 2, 80, "float32"),
    (2, 14, 3, 128, "float32"),
    (4, 2, 8, 96, "float32"),
    (5, 3, 5, 112, "float32"),
    (2, 2, 16, 256, "bfloat16"),
    (3, 8, 3, 64, "float16"),
]


@pytest.mark.parametrize(("sequences", "heads", "segments", "head_dim", "dtype"), _SEGMENTS)
def test_reduce_segments(sequences: int, heads: int, segments: int, head_dim: int, dtype: str) -> None:
    run = jax.jit(functools.partial(reduce_segments, interpret=True))
    expect = jax.jit(reference.reduce_segments)
    shape = (sequences, heads, segments)

    @settings(max_examples=50, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
        far = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]), "how far apart the greatest scores are")
        has_seen = rng.random(shape) < data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]), "share of segments that saw")
        m = np.where(has_seen, far * rng.standard_normal(shape), MASKED).astype(np.float32)
        total = np.where(has_seen, rng.uniform(1, 50, shape), 0).astype(np.float32)
        acc = np.where(has_seen[..., None], rng.standard_normal((*shape, head_dim)), 0).astype(np.float32)
        kv_lens = rng.integers(0, 3, sequences).astype(np.int32)
        before = rng.standard_normal((sequences + 2, heads, head_dim)).astype(jnp.dtype(dtype))
        # Programs of sequences that are empty leave their partial results unset.
        m[kv_lens == 0], total[kv_lens == 0], acc[kv_lens == 0] = np.nan, np.nan, np.nan

        got = np.asarray(run(Softmax(*map(jnp.asarray, (m, total, acc))), kv_lens, before))
        rows = np.flatnonzero(kv_lens)
        flat = (array[rows].reshape(-1, *array.shape[2:]) for array in (acc, m, total))
        padded = (np.resize(array, (sequences * heads, *array.shape[1:])) for array in flat)
        expected = np.asarray(expect(*padded))[: len(rows) * heads].reshape(-1, heads, head_dim)
        expect_close(got[rows], expected, dtype)
        others = np.setdiff1d(np.arange(sequences + 2), rows)
        assert same_bits(got[others], before[others])

    check()


def _plain(case: AttentionCase, batch: Batch) -> np.ndarray:
    """Attention in float64, one query and one head at a time."""
    of = contents(case)
    q, k, v = (np.asarray(array, np.float64) for array in (of.q, of.k, of.v))
    if of.k_scales is not None and of.v_scales is not None:
        k, v = k * of.k_scales[..., None], v * of.v_scales[..., None]
    out = np.zeros(q.shape)
    for sequence, table in enumerate(batch.block_tables):
        begin, end = batch.cu_q_lens[sequence : sequence + 2]
        for row in range(begin, end):
            past = batch.kv_lens[sequence] - (end - 1 - row)
            at = np.arange(max(0, past - batch.window) if case.window else 0, past)
            for head in range(case.heads):
                where = (table[at // case.block_size], head // case.group, at % case.block_size)
                scores = k[where] @ q[row, head] * case.options["scale"]
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores)
                total = weights.sum() + (0 if of.sinks is None else np.exp(np.float64(of.sinks[head])))
                out[row, head] = weights @ v[where] / total
    return out


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[8], CASES[10]], ids=str)
def test_the_reference(case: AttentionCase) -> None:
    @settings(max_examples=5, deadline=None)
    @given(ragged_batches(case), decode_batches(case))
    def check(ragged: Batch, decode: Batch) -> None:
        expect_close(ragged_expected(case, ragged), _plain(case, ragged), "float32")
        filled = Batch(
            decode.block_tables, decode.cu_q_lens, np.maximum(decode.kv_lens, 1), decode.num_decodes, decode.window
        )
        expect_close(decode_expected(case, filled), _plain(case, filled)[: case.sequences], "float32")

    check()


def test_the_reference_of_segments() -> None:
    """Any cut of a softmax gives the whole."""
    rng = np.random.default_rng(0)
    scores, values = 4 * rng.standard_normal((3, 4, 6)), rng.standard_normal((3, 4, 6, 10))
    weights = np.exp(scores)
    whole = np.einsum("nst,nstd->nd", weights, values) / weights.sum((1, 2))[:, None]
    m = scores.max(2)
    parts = np.exp(scores - m[..., None])
    acc = np.einsum("nst,nstd->nsd", parts, values)
    arrays = (jnp.asarray(array, jnp.float32) for array in (acc, m * LOG2_E, parts.sum(2)))
    expect_close(np.asarray(reference.reduce_segments(*arrays)), whole, "float32")


class Traffic:
    """What all programs load of K and V, in kernels traced from now on.

    Attributes:
        lanes: unmasked lanes of the last call's loads.
        tiles: the loads themselves.
    """

    def __init__(self, cache_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
        self.lanes = self.tiles = 0
        load = plgpu.load

        def counting(ref: Any, *, mask: jax.Array | None = None, **options: Any) -> jax.Array:
            value = load(ref, mask=mask, **options)
            if ref.ref.shape == cache_shape:  # K or V: no other array has their shape
                lanes = jnp.int32(value.size) if mask is None else jnp.sum(jnp.broadcast_to(mask, value.shape))
                jax.debug.callback(self._add, lanes)
            return value

        monkeypatch.setattr(plgpu, "load", counting)

    def _add(self, lanes: jax.Array) -> None:
        self.lanes += int(lanes)
        self.tiles += 1

    def count(self, call: Callable[[], jax.Array]) -> None:
        self.lanes = self.tiles = 0
        jax.block_until_ready(call())
        jax.effects_barrier()


_TRAFFIC = [
    AttentionCase(2, 4, 128, 16, 8, 32, 1),
    AttentionCase(2, 4, 80, 16, 8, 64, 3, "bfloat16"),
    AttentionCase(1, 7, 64, 32, 8, 16, 1, "bfloat16", "int8", window=True),
    AttentionCase(3, 2, 96, 64, 8, 32, 8, window=True, sinks=True),
    AttentionCase(2, 1, 256, 8, 8, 64, 2, "float32", "float8_e4m3fn", window=True),
]


@pytest.mark.parametrize("case", _TRAFFIC, ids=str)
def test_bytes_that_decode_moves(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the floor: K and V of each visible token once. The bytes of the block tables are not counted."""
    of = contents(case)
    traffic = Traffic(of.k.shape, monkeypatch)
    tables = np.random.default_rng(0).permutation(case.num_blocks)[: case.sequences * case.max_blocks]
    tables = tables.reshape(case.sequences, case.max_blocks).astype(np.int32)
    kv_lens = np.array([case.context, 1, 0, 61, case.context - 5], np.int32)
    tiles = DecodeTiles(case.tokens, case.segments, num_warps=4, num_stages=2)
    run = jax.jit(functools.partial(paged_decode, tiles=tiles, interpret=True, **case.options))
    for window in (1, 40, case.context) if case.window else (case.context,):
        batch = Batch(tables, np.arange(case.sequences + 1), kv_lens, case.sequences, window)
        arrays, optional = _arrays(case, of, batch)
        traffic.count(functools.partial(run, of.q, *arrays, kv_lens, **optional))
        floor = 2 * int(np.minimum(kv_lens, window).sum()) * case.kv_heads * case.head_dim * of.k.dtype.itemsize
        assert floor <= traffic.lanes * of.k.dtype.itemsize <= 1.05 * floor
        # No program works on a tile in which nothing is seen, either.
        first, past = np.maximum(kv_lens - window, 0) // case.tokens, -(-kv_lens // case.tokens)
        assert traffic.tiles == 2 * case.kv_heads * (past - first).sum()


def test_what_the_prefill_kernel_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are left to the other kernel, padding costs nothing, and a tile of queries reads what it needs."""
    case = AttentionCase(2, 2, 64, 16, 16, 32, 1, window=True)
    of = contents(case)
    traffic = Traffic(of.k.shape, monkeypatch)
    tiles = PrefillTiles(case.queries, case.tokens, num_warps=4, num_stages=2)
    run = jax.jit(functools.partial(ragged_paged_attention, tiles=tiles, interpret=True, **case.options))
    tables = np.arange(case.sequences * case.max_blocks, dtype=np.int32).reshape(case.sequences, -1)

    def tokens(cu_q_lens: list[int], kv_lens: list[int], num_decodes: int, window: int) -> int:
        """Tokens read for each KV head, K and V together counted once."""
        batch = Batch(tables, np.array(cu_q_lens, np.int32), np.array(kv_lens, np.int32), num_decodes, window)
        arrays, optional = _arrays(case, of, batch)
        lens = (batch.cu_q_lens, batch.kv_lens, np.int32(num_decodes))
        traffic.count(functools.partial(run, of.q, *arrays, *lens, **optional))
        return traffic.lanes // (2 * case.kv_heads * case.head_dim)

    assert tokens([0] * 6, [0] * 5, 0, 999) == 0
    assert tokens([0, 1, 2, 3, 4, 5], [9, 99, 128, 1, 50], 5, 999) == 0
    assert tokens([0, 1, 2, 3, 4, 5], [9, 99, 128, 1, 50], 4, 999) == 50
    # Positions 90 to 105, a window of 5: tokens 86 to 105, read from the start of their tile, 64.
    assert tokens([0, 16, 16, 16, 16, 16], [106, 7, 0, 0, 0], 0, 5) == 106 - 64
    # Two tiles of queries, whose last tokens are 55 and 71; the first reads its last tile of tokens whole.
    assert tokens([0, 32, 32, 32, 32, 32], [72, 0, 0, 0, 0], 0, 999) == 64 + 72
