"""From the host's plan to the device's ``StepInput``: NumPy arrays in the shapes of a token bucket."""

import dataclasses
import itertools
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.attention_batch import AttentionBatch
from pagedjax.config import MAX_LOGIT_BIAS, ModelConfig
from pagedjax.sampling import SamplingInput
from pagedjax.sampling_rows import SamplingRows
from pagedjax.step import RowInput, StepInput, TokenInput, min_rows
from pagedjax.xla_attention import DECODE_GROUP


@dataclass(frozen=True)
class StepShapes:
    """The sizes that fix every shape of a step, but for the token bucket.

    ``num_lanes`` sequences at once (a multiple of 8), ``max_blocks`` in each of a sequence's ``num_groups`` block
    tables, ``block_size`` slots in each of ``num_blocks`` blocks. A step is padded to one of ``buckets`` tokens and one
    of ``row_buckets`` sampled rows, both ascending.
    """

    num_lanes: int
    max_blocks: int
    block_size: int
    num_blocks: int
    vocab_size: int
    buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    num_groups: int = 1

    @classmethod
    def plan(
        cls,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        token_budget: int = 512,
    ) -> "StepShapes":
        """Shapes for a model: token buckets in powers of two from the fewest rows that keep a row's bits.

        ``max_model_len`` is what the cache holds, or the model's if that is less, unless it is given.
        """
        longest = max_model_len or min(config.max_model_len, num_blocks * block_size)
        buckets = [min_rows(config.dtype)]
        while buckets[-1] < token_budget:
            buckets.append(min(buckets[-1] * 2, -(-token_budget // DECODE_GROUP) * DECODE_GROUP))
        num_lanes = -(-max_num_seqs // DECODE_GROUP) * DECODE_GROUP
        row_buckets = [DECODE_GROUP]
        while row_buckets[-1] < num_lanes:
            row_buckets.append(min(row_buckets[-1] * 4, num_lanes))
        return cls(
            num_lanes=num_lanes,
            max_blocks=-(-longest // block_size),
            block_size=block_size,
            num_blocks=num_blocks,
            vocab_size=config.vocab_size,
            buckets=tuple(buckets),
            row_buckets=tuple(row_buckets),
            num_groups=config.cache_layout.num_groups,
        )

    def bucket(self, num_tokens: int) -> int:
        """The smallest bucket that holds ``num_tokens``."""
        return next(bucket for bucket in self.buckets if bucket >= num_tokens)

    def row_bucket(self, num_rows: int) -> int:
        """The smallest bucket that holds ``num_rows``; 0 for none."""
        return next(bucket for bucket in self.row_buckets if bucket >= num_rows) if num_rows else 0

    def max_seqs(self, bucket: int) -> int:
        """S of a token bucket: no step has more sequences than tokens."""
        return min(bucket, self.num_lanes)


class PackedRow(NamedTuple):
    """One sequence's share of a step.

    ``token_ids`` are the tokens from position ``start`` on, as far as the host knows them; where ``feedback`` is set,
    the one token is the lane's last sampled one instead. ``block_tables`` has one table per cache group; an entry below
    0 is never looked at. Tokens before position ``first_write`` are in the cache already and are not written again.
    ``prompt_targets`` are the successors of the share's first tokens whose log-probabilities are wanted.
    """

    lane: int
    start: int
    token_ids: ListLike[int]
    block_tables: ListLike[ListLike[int]]
    samples: bool
    feedback: bool = False
    first_write: int = 0
    prompt_targets: ListLike[int] = ()
    table_key: object = None  # while it stays the same, a lane's tables change from the share's first block on only


class StepPacker:
    """Packs plans into ``StepInput``. It keeps each lane's block table and sampling settings between steps.

    Attributes:
        shapes: the sizes.
        sampling_rows: each lane's sampling settings; the caller sets them when a sequence gets its lane.
    """

    def __init__(self, shapes: StepShapes):
        self.shapes = shapes
        self.sampling_rows = SamplingRows(shapes.num_lanes, shapes.vocab_size, MAX_LOGIT_BIAS)
        self._tables = np.zeros((shapes.num_groups, shapes.num_lanes, shapes.max_blocks), np.int32)
        self._table_keys: list[object] = [None] * shapes.num_lanes
        self._table_lens = [0] * shapes.num_lanes
        # What most steps leave alone is large, so it stays on the device.
        self._plain = {
            rows: {
                "bias_ids": jnp.full((rows, MAX_LOGIT_BIAS), -1, jnp.int32),
                "bias_values": jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
                "allowed": jnp.zeros((rows, -(-shapes.vocab_size // 32)), jnp.uint32),
            }
            for rows in (0, *shapes.row_buckets)
        }

    def pack(
        self,
        rows: ListLike[PackedRow],
        num_decodes: int,
        last_tokens: jax.Array,
        copies: ListLike[tuple[int, int]] = (),
        *,
        bucket: int | None = None,
        row_bucket: int | None = None,
    ) -> StepInput:
        """The step that computes ``rows``, of which the first ``num_decodes`` have one token each.

        Args:
            rows: the sequences' shares, decodes first.
            num_decodes: how many of them are decodes.
            last_tokens: ``[L]`` int32 of the step before.
            copies: pairs of blocks, from and to, copied in this order before anything is written.
            bucket, row_bucket: sizes to pad to; by default the smallest buckets that hold what there is.
        """
        counts = np.array([len(row.token_ids) for row in rows], np.int32)
        total = int(counts.sum())
        size = bucket or self.shapes.bucket(total)
        max_seqs = self.shapes.max_seqs(size)
        for row in rows:
            self._update_tables(row)
        tables = np.zeros((self.shapes.num_groups, max_seqs, self.shapes.max_blocks), np.int32)
        tables[:, : len(rows)] = self._tables[:, [row.lane for row in rows]]
        starts = np.array([row.start for row in rows], np.int32)
        cu_q_lens = np.full(max_seqs + 1, total, np.int32)
        cu_q_lens[: len(rows)] = np.cumsum(counts) - counts
        kv_lens = np.zeros(max_seqs, np.int32)
        kv_lens[: len(rows)] = starts + counts
        token_ids, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        feedback = np.full(size, -1, np.int32)
        token_ids[:total] = list(itertools.chain.from_iterable(row.token_ids for row in rows))
        seq_of_token = np.repeat(np.arange(len(rows)), counts)
        positions[:total] = np.arange(total) - cu_q_lens[seq_of_token] + starts[seq_of_token]
        for index, row in enumerate(rows):
            if row.feedback:
                feedback[cu_q_lens[index]] = row.lane
        block_size = self.shapes.block_size
        past_end = self.shapes.num_blocks * block_size
        slots = np.full((self.shapes.num_groups, size), past_end, np.int32)
        blocks = tables[:, seq_of_token, positions[:total] // block_size]
        first_writes = np.array([row.first_write for row in rows], np.int32)
        is_new = positions[:total] >= first_writes[seq_of_token]
        slots[:, :total] = np.where(is_new, blocks * block_size + positions[:total] % block_size, past_end)
        pairs = np.zeros((max_seqs * self.shapes.num_groups, 2), np.int32)
        pairs[: len(copies)] = np.array(copies, np.int32).reshape(-1, 2)
        # NumPy arrays stand in for device arrays: the call of the compiled step makes these of them.
        batch: Any = (tables, cu_q_lens, kv_lens, np.int32(num_decodes), np.int32(len(rows)))
        fields: dict[str, Any] = {
            "token_ids": token_ids,
            "feedback": feedback,
            "positions": positions,
            "slots": slots,
            "batch": AttentionBatch(*batch),
            "copies": pairs,
            "num_copies": np.int32(len(copies)),
            "sampled": np.zeros(self.shapes.num_lanes, np.int32),
        }
        seqs = [index for index, row in enumerate(rows) if row.samples]
        fields["sampled"][: len(seqs)] = (np.cumsum(counts) - 1)[seqs]
        tokens = TokenInput(**fields, **_prompt_rows(rows, cu_q_lens, size))
        num_rows = row_bucket if row_bucket is not None else self.shapes.row_bucket(len(seqs))
        lanes = [rows[index].lane for index in seqs]
        return StepInput(tokens, self._rows(lanes, kv_lens[seqs], tables[0, seqs], num_rows), last_tokens)

    def with_masks(self, rows: RowInput) -> RowInput:
        """Packed rows, with the masks that their lanes have by now."""
        taken = self.sampling_rows.take_masks(np.asarray(rows.lanes))
        fields: dict[str, Any] = {name: value for name, value in taken.items() if value is not None}
        return dataclasses.replace(rows, sampling=dataclasses.replace(rows.sampling, **fields))

    def _update_tables(self, row: PackedRow) -> None:
        lane, new = row.lane, len(row.block_tables[0])
        if self._table_keys[lane] != row.table_key or row.table_key is None:
            self._table_keys[lane], self._table_lens[lane] = row.table_key, 0
        # A block that the share writes into may have been exchanged for a copy of it.
        known = min(self._table_lens[lane], row.start // self.shapes.block_size)
        if new > known:
            for kept, table in zip(self._tables, row.block_tables, strict=True):
                kept[lane, known:new] = table[known:]
            np.maximum(self._tables[:, lane, known:new], 0, out=self._tables[:, lane, known:new])
            self._table_lens[lane] = new

    def _rows(self, lanes: list[int], lens: np.ndarray, tables: np.ndarray, num_rows: int) -> RowInput:
        missing = num_rows - len(lanes)
        lens = np.pad(lens, (0, missing))
        taken = self.sampling_rows.take(lanes, num_rows)
        fields: dict[str, Any] = {name: value for name, value in taken.items() if value is not None}
        fields = self._plain[num_rows] | fields | {"history_len": lens, "position": lens}
        padded: Any = np.array(lanes + [self.shapes.num_lanes] * missing, np.int32)
        of_rows: Any = np.pad(tables, ((0, missing), (0, 0)))
        return RowInput(padded, of_rows, SamplingInput(**fields))


def _prompt_rows(rows: ListLike[PackedRow], cu_q_lens: np.ndarray, size: int) -> dict[str, Any]:
    prompt_rows, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
    count = 0
    for index, row in enumerate(rows):
        wanted = len(row.prompt_targets)
        prompt_rows[count : count + wanted] = np.arange(cu_q_lens[index], cu_q_lens[index] + wanted)
        targets[count : count + wanted] = row.prompt_targets
        count += wanted
    return {"prompt_rows": prompt_rows, "prompt_targets": targets, "num_prompt_rows": np.int32(count)}
