"""From the host's plan to the device's ``StepInput``: NumPy arrays in the shapes of a token bucket."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.attention import DECODE_GROUP, AttentionBatch
from pagedjax.config import MAX_LOGIT_BIAS
from pagedjax.sampling import SamplingInput
from pagedjax.sampling_rows import SamplingRows
from pagedjax.step import StepInput, min_rows


@dataclass(frozen=True)
class StepShapes:
    """The sizes that fix every shape of a step, but for the token bucket.

    ``num_lanes`` sequences at once (a multiple of 8), ``max_blocks`` in a block table, ``block_size`` slots in each
    of ``num_blocks`` blocks, ``buckets`` the numbers of tokens that a step is padded to, ascending.
    """

    num_lanes: int
    max_blocks: int
    block_size: int
    num_blocks: int
    vocab_size: int
    buckets: tuple[int, ...]

    @classmethod
    def plan(
        cls, *, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int,
        token_budget: int, dtype: str,
    ) -> "StepShapes":  # fmt: skip
        """Buckets in powers of two from the fewest rows that keep a row's bits, up to the token budget."""
        buckets = [min_rows(dtype)]
        while buckets[-1] < token_budget:
            buckets.append(buckets[-1] * 2)
        return cls(
            num_lanes=-(-max_num_seqs // DECODE_GROUP) * DECODE_GROUP,
            max_blocks=-(-max_model_len // block_size),
            block_size=block_size,
            num_blocks=num_blocks,
            vocab_size=vocab_size,
            buckets=tuple(buckets),
        )

    def bucket(self, num_tokens: int) -> int:
        """The smallest bucket that holds ``num_tokens``."""
        return next(bucket for bucket in self.buckets if bucket >= num_tokens)

    def max_seqs(self, bucket: int) -> int:
        """S and R of a bucket: no step has more sequences than tokens."""
        return min(bucket, self.num_lanes)


class PackedRow(NamedTuple):
    """One sequence's share of a step.

    ``token_ids`` are the tokens from position ``start`` on, as far as the host knows them; where ``feedback`` is set,
    the one token is the lane's last sampled one instead. ``prompt_targets`` are the successors of the share's first
    tokens whose log-probabilities are wanted.
    """

    lane: int
    start: int
    token_ids: ListLike[int]
    block_table: ListLike[int]
    samples: bool
    feedback: bool = False
    prompt_targets: ListLike[int] = ()
    table_key: object = None  # the lane's table is kept while this stays the same, and only grows


class StepPacker:
    """Packs plans into ``StepInput``. It keeps each lane's block table and sampling settings between steps.

    Attributes:
        shapes: the sizes.
        sampling_rows: each lane's sampling settings; the caller sets them when a sequence gets its lane.
    """

    def __init__(self, shapes: StepShapes):
        self.shapes = shapes
        self.sampling_rows = SamplingRows(shapes.num_lanes, shapes.vocab_size, MAX_LOGIT_BIAS)
        self._tables = np.zeros((shapes.num_lanes, shapes.max_blocks), np.int32)
        self._table_keys: list[object] = [None] * shapes.num_lanes
        self._table_lens = [0] * shapes.num_lanes
        # What most steps leave alone is large, so it stays on the device.
        self._plain = {
            rows: {
                "bias_ids": jnp.full((rows, MAX_LOGIT_BIAS), -1, jnp.int32),
                "bias_values": jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
                "allowed": jnp.zeros((rows, -(-shapes.vocab_size // 32)), jnp.uint32),
            }
            for rows in {shapes.max_seqs(bucket) for bucket in shapes.buckets}
        }

    def pack(
        self, rows: ListLike[PackedRow], num_decodes: int, last_tokens: jax.Array, bucket: int | None = None
    ) -> StepInput:
        """The step that computes ``rows``, of which the first ``num_decodes`` have one token each.

        Args:
            rows: the sequences' shares, decodes first.
            num_decodes: how many of them are decodes.
            last_tokens: ``[L]`` int32 of the step before.
            bucket: tokens to pad to; by default the smallest bucket that holds them.
        """
        counts = [len(row.token_ids) for row in rows]
        total = sum(counts)
        size = bucket or self.shapes.bucket(total)
        max_seqs = self.shapes.max_seqs(size)
        cu_q_lens = np.full(max_seqs + 1, total, np.int32)
        cu_q_lens[0] = 0
        np.cumsum(counts, out=cu_q_lens[1 : len(rows) + 1])
        token_ids, feedback = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        kv_lens = np.zeros(max_seqs, np.int32)
        lanes = [row.lane for row in rows]
        at = 0
        for index, row in enumerate(rows):
            token_ids[at : at + counts[index]] = row.token_ids
            if row.feedback:
                feedback[at] = row.lane
            kv_lens[index] = row.start + counts[index]
            at += counts[index]
            self._update_table(row)
        tables = np.zeros((max_seqs, self.shapes.max_blocks), np.int32)
        tables[: len(rows)] = self._tables[lanes]
        seq_of_token = np.repeat(np.arange(len(rows)), np.asarray(counts, np.intp))
        positions = np.zeros(size, np.int32)
        starts = kv_lens[: len(rows)] - np.asarray(counts, np.int32)
        positions[:total] = np.arange(total) - cu_q_lens[seq_of_token] + starts[seq_of_token]
        slots = np.full(size, self.shapes.num_blocks * self.shapes.block_size, np.int32)
        block = tables[seq_of_token, positions[:total] // self.shapes.block_size]
        slots[:total] = block * self.shapes.block_size + positions[:total] % self.shapes.block_size
        return StepInput(
            token_ids=token_ids,
            feedback=feedback,
            positions=positions,
            slots=slots,
            batch=AttentionBatch(tables, cu_q_lens, kv_lens, np.int32(num_decodes), np.int32(len(rows))),
            last_tokens=last_tokens,
            **self._logit_rows(rows, cu_q_lens, kv_lens),
            **_prompt_rows(rows, cu_q_lens, size),
        )  # type: ignore[arg-type]  # NumPy arrays become device arrays at the call

    def _update_table(self, row: PackedRow) -> None:
        lane = row.lane
        if self._table_keys[lane] != row.table_key or row.table_key is None:
            self._table_keys[lane], self._table_lens[lane] = row.table_key, 0
        known, new = self._table_lens[lane], len(row.block_table)
        if new > known:
            self._tables[lane, known:new] = row.block_table[known:]
            self._table_lens[lane] = new

    def _logit_rows(
        self, rows: ListLike[PackedRow], cu_q_lens: np.ndarray, kv_lens: np.ndarray
    ) -> dict[str, object]:
        max_rows = len(kv_lens)
        seqs = [index for index, row in enumerate(rows) if row.samples]
        lanes = [rows[index].lane for index in seqs]
        count = len(seqs)
        logit_rows, logit_seqs = np.zeros(max_rows, np.int32), np.zeros(max_rows, np.int32)
        logit_seqs[:count] = seqs
        logit_rows[:count] = cu_q_lens[1:][seqs] - 1
        lane_of_row = np.full(max_rows, self.shapes.num_lanes, np.int32)
        lane_of_row[:count] = lanes
        lens = np.zeros(max_rows, np.int32)
        lens[:count] = kv_lens[seqs]
        fields = self.sampling_rows.take(lanes, max_rows)
        given = {name: value for name, value in fields.items() if value is not None}
        return {
            "logit_rows": logit_rows,
            "logit_seqs": logit_seqs,
            "lanes": lane_of_row,
            "num_logit_rows": np.int32(count),
            "sampling": SamplingInput(**(self._plain[max_rows] | given), history_len=lens, position=lens),
        }


def _prompt_rows(rows: ListLike[PackedRow], cu_q_lens: np.ndarray, size: int) -> dict[str, object]:
    prompt_rows, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
    count = 0
    for index, row in enumerate(rows):
        wanted = len(row.prompt_targets)
        prompt_rows[count : count + wanted] = np.arange(cu_q_lens[index], cu_q_lens[index] + wanted)
        targets[count : count + wanted] = row.prompt_targets
        count += wanted
    return {"prompt_rows": prompt_rows, "prompt_targets": targets, "num_prompt_rows": np.int32(count)}
