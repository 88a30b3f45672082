"""Paged attention against a plain float64 loop, and to the bit against itself in other batches."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.attention_batch import AttentionBatch
from pagedjax.xla_attention import paged_attention_xla

SEQS, CONTEXT, WHOLE = 8, 512, 300


@dataclass(frozen=True)
class Shape:
    """A model's attention and a cache of it."""

    kv_heads: int
    groups: int
    head_dim: int
    block_size: int
    dtype: str
    window: int | None = None
    softcap: float | None = None


SHAPES = [
    Shape(4, 3, 64, 16, "bfloat16"),
    Shape(1, 4, 256, 16, "bfloat16", window=100),
    Shape(2, 7, 64, 16, "bfloat16"),
    Shape(1, 4, 256, 16, "float32"),
    Shape(2, 2, 16, 8, "float32", window=8),
    Shape(2, 2, 32, 32, "float32", softcap=5.0),
    Shape(2, 7, 80, 16, "float32"),
    Shape(8, 1, 96, 16, "float32", window=300),
]


class Paged:
    """A random cache of eight sequences, and attention over it."""

    def __init__(self, shape: Shape):
        rng = np.random.default_rng(0)
        self.shape, per_sequence = shape, CONTEXT // shape.block_size
        of_cache = (SEQS * per_sequence, shape.kv_heads, shape.block_size, shape.head_dim)
        self.k, self.v = (jnp.asarray(rng.standard_normal(of_cache), shape.dtype) for _ in range(2))
        self.tables = rng.permutation(of_cache[0]).reshape(SEQS, per_sequence).astype(np.int32)
        self.q = jnp.asarray(rng.standard_normal((WHOLE, shape.kv_heads * shape.groups, shape.head_dim)), shape.dtype)
        self.options = {"scale": shape.head_dim**-0.5, "window": shape.window, "softcap": shape.softcap}

    def run(self, queries: jax.Array, lens: list[tuple[int, int]], decodes: int, tables: np.ndarray) -> np.ndarray:
        """Attention of packed queries; ``lens`` are (queries, context) of each sequence."""
        count = queries.shape[0]
        padded = jnp.pad(queries, ((0, -count % 64), (0, 0), (0, 0)))
        q_lens, kv_lens = (np.array(part + (0,) * (SEQS - len(lens)), np.int32) for part in zip(*lens, strict=True))
        cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        fields = (tables, cu_q_lens, kv_lens, np.int32(decodes), np.int32(len(lens)))
        batch = AttentionBatch(*(jnp.asarray(field) for field in fields))
        return np.asarray(paged_attention_xla(padded, self.k, self.v, batch, **self.options))[:count]

    def reference(self, queries: jax.Array, lens: list[tuple[int, int]], tables: np.ndarray) -> np.ndarray:
        """The same, one query and head at a time."""
        q, k, v = (np.asarray(a, np.float64) for a in (queries, self.k, self.v))
        out, at, size = np.zeros(q.shape), 0, self.shape.block_size
        for sequence, (count, context) in enumerate(lens):
            where = np.arange(context)
            keys, values = (a[tables[sequence][where // size], :, where % size] for a in (k, v))
            for position in range(context - count, context):
                first = max(0, position - (self.shape.window or CONTEXT) + 1)
                for head in range(q.shape[1]):
                    of = head // self.shape.groups
                    scores = keys[first : position + 1, of] @ q[at, head] * self.options["scale"]
                    if self.shape.softcap:
                        scores = self.shape.softcap * np.tanh(scores / self.shape.softcap)
                    weights = np.exp(scores - scores.max())
                    out[at, head] = weights @ values[first : position + 1, of] / weights.sum()
                at += 1
        return out


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def paged(request: pytest.FixtureRequest) -> Paged:
    return Paged(request.param)


@pytest.fixture(scope="module")
def whole(paged: Paged) -> np.ndarray:
    """Sequence 0's 300 tokens in one piece."""
    return paged.run(paged.q, [(WHOLE, WHOLE)], 0, paged.tables)


def test_mixed_batch(paged: Paged) -> None:
    lens = [(1, 17), (1, 129), (1, 300), (20, 40), (1, 1), (33, 200)]
    queries = paged.q[: sum(count for count, _ in lens)]
    found = paged.run(queries, lens, 3, paged.tables)
    tolerance = 1e-5 if paged.shape.dtype == "float32" else 1e-2
    np.testing.assert_allclose(found, paged.reference(queries, lens, paged.tables), rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 100])
def test_chunks_have_the_same_bits(paged: Paged, whole: np.ndarray, chunk: int) -> None:
    parts = [
        paged.run(
            paged.q[start : start + chunk], [(min(chunk, WHOLE - start), min(start + chunk, WHOLE))], 0, paged.tables
        )
        for start in range(0, WHOLE, chunk)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("position", [0, 5, 127, 128, 129, 299])
def test_decodes_have_the_same_bits(paged: Paged, whole: np.ndarray, position: int) -> None:
    """As a row among others, in another place of the batch."""
    lens = [(1, 17), (1, position + 1), (1, 300), (20, 40)]
    tables = paged.tables[[1, 0, *range(2, SEQS)]]
    queries = jnp.concatenate([paged.q[:1], paged.q[position : position + 1], paged.q[3:4], paged.q[:20]])
    assert np.array_equal(paged.run(queries, lens, 3, tables)[1], whole[position])


def test_what_is_not_seen_does_not_matter(paged: Paged, whole: np.ndarray) -> None:
    """Slots past a sequence's end, and whole other sequences, may hold anything finite."""
    other = Paged(paged.shape)
    size, largest = paged.shape.block_size, float(jnp.finfo(paged.shape.dtype).max)
    seen = np.zeros((paged.k.shape[0], size), bool)
    where = np.arange(WHOLE)
    seen[paged.tables[0][where // size], where % size] = True
    other.k = jnp.where(seen[:, None, :, None], paged.k, largest)
    other.v = jnp.where(seen[:, None, :, None], paged.v, -largest)
    assert np.array_equal(other.run(paged.q, [(WHOLE, WHOLE)], 0, paged.tables), whole)
