"""Traces made fit for a machine: lengths, arrivals, and the names of shared blocks."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.traces import PrefixKeys, TraceRequest, at_rate


def test_scaled_and_clipped() -> None:
    request = TraceRequest(3.0, 1000, 7, (1, 2))
    assert request.scaled(0.1) == TraceRequest(3.0, 100, 1, (1, 2), hash_tokens=51.2)
    assert request.scaled(0.0001) == TraceRequest(3.0, 1, 1, (1, 2), hash_tokens=0.0512)
    assert request.clipped(1007) is request
    assert request.clipped(1006) == TraceRequest(3.0, 999, 7, (1, 2))
    assert request.clipped(5) == TraceRequest(3.0, 1, 4, (1, 2))


def test_at_rate() -> None:
    requests = [TraceRequest(arrival, 1, 1) for arrival in (0.0, 1.0, 7.0, 8.0)]
    assert [r.arrival for r in at_rate(requests, 0.75)] == [0.0, 0.5, 3.5, 4.0]
    assert [r.arrival for r in at_rate(requests, float("inf"))] == [0.0] * 4
    assert [r.arrival for r in at_rate(requests[:1], 2.0)] == [0.0]


@pytest.mark.parametrize("block_size", [8, 16, 512, 1024])
def test_names_of_blocks(block_size: int) -> None:
    keys = PrefixKeys(block_size)
    first = keys.of(TraceRequest(0.0, 2000, 1, (5, 6, 7, 8)))
    assert len(first) == len(set(first)) == 2000 // block_size
    same = keys.of(TraceRequest(0.0, 1700, 1, (5, 6, 7, 9)))
    shared = 1536 // block_size  # three ids' worth
    assert same[:shared] == first[:shared]
    assert not set(same[shared:]) & set(first)
    other = keys.of(TraceRequest(0.0, 2000, 1, (4, 6, 7, 8)))
    assert not set(other) & set(first), "a block's name stands for all that is before it too"
    longer = keys.of(TraceRequest(0.0, 4000, 1, (5, 6, 7, 8)))
    assert longer == first[: len(longer)] or longer[: len(first)] == first
    assert len(longer) == 2048 // block_size, "what no id stands for has no name"
    assert keys.of(TraceRequest(0.0, 4000, 1)) == []


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=2, max_size=6),
    st.integers(1, 40),
    st.floats(0.5, 40),
    st.integers(1, 200),
)
def test_equal_names_mean_equal_beginnings(
    chains: list[list[int]], block_size: int, hash_tokens: float, prompt: int
) -> None:
    keys = PrefixKeys(block_size)
    blocks: dict[int, Sequence[int]] = {}
    for chain in chains:
        named = keys.of(TraceRequest(0.0, prompt, 1, tuple(chain), hash_tokens))
        assert len(set(named)) == len(named)
        assert len(named) * block_size <= min(prompt, len(chain) * hash_tokens)
        assert (len(named) + 1) * block_size > min(prompt, int(len(chain) * hash_tokens))
        for index, key in enumerate(named):
            ids = (index, *chain[: int(((index + 1) * block_size - 1) // hash_tokens) + 1])
            assert blocks.setdefault(key, ids) == ids
