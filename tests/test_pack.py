"""From shares to arrays: positions, slots and rows, against a plain loop; and the shapes that there are."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from pagedjax import PackedRow, SamplingParams, StepPacker, StepShapes, load_model

CONFIG = load_model(str(GOLDEN / "llama"), dtype="bfloat16", show_progress=False).config
LANES, BLOCK_SIZE, BLOCKS = 8, 16, 64
SHAPES = StepShapes.plan(CONFIG, num_blocks=BLOCKS, max_num_seqs=LANES, max_model_len=128, token_budget=64)


@pytest.mark.parametrize(
    ("budget", "buckets"), [(8, (8,)), (9, (8, 16)), (64, (8, 16, 32, 64)), (65, (8, 16, 32, 64, 72))]
)
def test_no_bucket_is_larger_than_the_budget_needs(budget: int, buckets: tuple[int, ...]) -> None:
    assert StepShapes.plan(CONFIG, num_blocks=8, token_budget=budget).buckets == buckets


def test_row_buckets_end_with_the_lanes() -> None:
    assert StepShapes.plan(CONFIG, num_blocks=8, max_num_seqs=1).row_buckets == (8,)
    assert StepShapes.plan(CONFIG, num_blocks=8, max_num_seqs=60).row_buckets == (8, 32, 64)
    assert StepShapes.plan(CONFIG, num_blocks=8, max_num_seqs=60).row_bucket(33) == 64
    assert StepShapes.plan(CONFIG, num_blocks=8, max_num_seqs=60).row_bucket(0) == 0


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[PackedRow], int]:
    """Decodes, then pieces of prompts, each with blocks of its own; at most 64 tokens."""
    counts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=LANES).filter(lambda c: sum(c) <= 64))
    decodes = draw(st.integers(0, len(counts)))
    lanes, blocks = draw(st.permutations(range(LANES))), draw(st.permutations(range(BLOCKS)))
    rows = []
    for index, count in enumerate([1] * decodes + counts[decodes:]):
        start = draw(st.integers(0, 128 - count))
        feedback = index < decodes and draw(st.booleans())
        rows.append(
            PackedRow(
                lane=lanes[index],
                start=start,
                token_ids=[0] if feedback else [draw(st.integers(0, 319)) for _ in range(count)],
                block_tables=[blocks[8 * index : 8 * index + -(-(start + count) // BLOCK_SIZE)]],
                first_write=draw(st.integers(0, start + count)),
                samples=index < decodes or draw(st.booleans()),
                feedback=feedback,
                prompt_targets=[7] * (count - 1) if draw(st.booleans()) else (),
                table_key=index,
            )
        )
    return rows, decodes


@given(shares())
def test_every_token_lies_where_its_block_table_says(drawn: tuple[list[PackedRow], int]) -> None:
    rows, decodes = drawn
    packer = StepPacker(SHAPES)
    for row in rows:
        packer.sampling_rows.set(row.lane, SamplingParams(temperature=0.5, logprobs=2), 1, (row.lane, 9))
    packed = packer.pack(rows, decodes, jnp.zeros(SHAPES.num_lanes, jnp.int32))
    tokens, batch = packed.tokens, packed.tokens.batch
    at, sampled, prompt_rows = 0, [], []
    for index, row in enumerate(rows):
        assert batch.cu_q_lens[index] == at
        assert batch.kv_lens[index] == row.start + len(row.token_ids)
        for offset, token in enumerate(row.token_ids):
            position = row.start + offset
            assert tokens.token_ids[at] == token
            assert tokens.feedback[at] == (row.lane if row.feedback else -1)
            assert tokens.positions[at] == position
            slot = row.block_tables[0][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            assert tokens.slots[0, at] == (slot if position >= row.first_write else BLOCKS * BLOCK_SIZE)
            if offset < len(row.prompt_targets):
                prompt_rows.append(at)
            at += 1
        if row.samples:
            sampled.append((index, at - 1))
    size = tokens.token_ids.shape[0]
    assert size == next(bucket for bucket in SHAPES.buckets if bucket >= at)
    assert (np.asarray(tokens.slots[:, at:]) == BLOCKS * BLOCK_SIZE).all(), "padding lies past the end"
    assert batch.num_decodes == decodes
    assert batch.num_seqs == len(rows)
    assert batch.cu_q_lens[-1] == at
    assert tokens.num_prompt_rows == len(prompt_rows)
    assert tokens.prompt_rows[: len(prompt_rows)].tolist() == prompt_rows
    assert tokens.sampled[: len(sampled)].tolist() == [row for _, row in sampled]
    count = packed.rows.lanes.shape[0]
    assert count == (8 if sampled else 0)
    for place, (index, _) in enumerate(sampled):
        row = rows[index]
        assert packed.rows.lanes[place] == row.lane
        assert packed.rows.block_tables[place][: len(row.block_tables[0])].tolist() == row.block_tables[0]
        assert packed.rows.sampling.history_len[place] == row.start + len(row.token_ids)
        assert packed.rows.sampling.key[place].tolist() == [row.lane, 9]
    assert (np.asarray(packed.rows.lanes[len(sampled) :]) == SHAPES.num_lanes).all(), "padding has no lane"


def test_a_lane_that_changes_hands_keeps_nothing() -> None:
    packer = StepPacker(SHAPES)
    last = jnp.zeros(SHAPES.num_lanes, jnp.int32)
    packer.pack([PackedRow(0, 0, [1] * 40, [[5, 6, 7]], True, table_key=1)], 0, last)
    grown = packer.pack([PackedRow(0, 40, [1] * 9, [[5, 6, 7, 8]], True, table_key=1)], 0, last)
    assert grown.tokens.batch.block_tables[0, 0, :4].tolist() == [5, 6, 7, 8]
    other = packer.pack([PackedRow(0, 0, [1] * 20, [[9, 2]], True, table_key=2)], 0, last)
    assert other.tokens.batch.block_tables[0, 0, :2].tolist() == [9, 2]
    assert other.tokens.slots[0, :2].tolist() == [9 * BLOCK_SIZE, 9 * BLOCK_SIZE + 1]


def test_a_block_exchanged_for_its_copy_is_seen() -> None:
    packer = StepPacker(SHAPES)
    last = jnp.zeros(SHAPES.num_lanes, jnp.int32)
    packer.pack([PackedRow(0, 0, [1] * 20, [[5, 6]], True, table_key=1)], 0, last)
    written = packer.pack([PackedRow(0, 20, [1], [[5, 9]], True, table_key=1)], 1, last, [(6, 9)])
    assert written.tokens.batch.block_tables[0, 0, :2].tolist() == [5, 9]
    assert written.tokens.slots[0, 0] == 9 * BLOCK_SIZE + 4
    assert written.tokens.num_copies == 1
    assert written.tokens.copies[0].tolist() == [6, 9]


def test_each_cache_group_has_its_table() -> None:
    """A block that has left its group's window is no block: any valid one may stand there."""
    shapes = dataclasses.replace(SHAPES, num_groups=2)
    packed = StepPacker(shapes).pack(
        [PackedRow(0, 17, [1], [[5, 6], [-1, 7]], True)], 1, jnp.zeros(shapes.num_lanes, jnp.int32)
    )
    assert packed.tokens.batch.block_tables[:, 0, :2].tolist() == [[5, 6], [0, 7]]
    assert packed.tokens.slots[:, 0].tolist() == [6 * BLOCK_SIZE + 1, 7 * BLOCK_SIZE + 1]
    assert packed.rows.block_tables[0, :2].tolist() == [5, 6]
