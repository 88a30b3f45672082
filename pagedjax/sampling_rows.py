"""What each lane asks of the sampler, in NumPy arrays: a step's sampling input is a few vectorised takes."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedjax.config import SamplingParams

Array = npt.NDArray[Any]

_PLAIN: dict[str, tuple[type, float]] = {  # field -> dtype, and the value that asks for nothing
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "presence_penalty": (np.float32, 0.0),
    "frequency_penalty": (np.float32, 0.0),
    "repetition_penalty": (np.float32, 1.0),
    "prompt_len": (np.int32, 0),
    "num_logprobs": (np.int32, -1),
}
# The least that top_p and repetition_penalty are taken for; the inverse is the greatest penalty. Beyond them float32
# makes 0 or infinity of a value, which then cuts nothing or makes logits infinite or NaN. The best of fewer than a
# million tokens has more than this of the mass, so that so small a top_p keeps it alone, as any smaller one does.
_LEAST = 1e-6


def derive_key(seed: int, sample_index: int) -> tuple[int, int]:
    """The random key of one of a request's n samples: two 32-bit words (high, low).

    Sample 0 has the seed itself (taken modulo 2^64), so that `n` does not change the first sample; the others
    have a BLAKE2b hash of seed and index.
    """
    seed %= 1 << 64
    if sample_index == 0:
        return seed >> 32, seed & 0xFFFFFFFF
    data = seed.to_bytes(8, "little") + sample_index.to_bytes(8, "little")
    digest = hashlib.blake2b(data, digest_size=8, person=b"sample").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class SamplingRows:
    """Sampling settings by lane; a lane is a running sequence's fixed place, whatever row a step gives it.

    Args:
        num_lanes: L.
        vocab_size: V.
        max_bias: B, the most logit_bias entries a request may have; a step's bias block is [R, B].

    Bias and mask blocks are large, so `take` leaves them out when no lane taken uses them.
    """

    def __init__(self, num_lanes: int, vocab_size: int, max_bias: int) -> None:
        self.vocab_size = vocab_size
        self._plain: dict[str, Array] = {
            name: np.full(num_lanes + 1, nothing, dtype) for name, (dtype, nothing) in _PLAIN.items()
        }
        self._key = np.zeros((num_lanes + 1, 2), np.uint32)
        # One lane past the end is the padding row: it is never set and asks for nothing.
        self._padding = num_lanes
        self._bias_ids = np.full((num_lanes + 1, max_bias), -1, np.int32)
        self._bias_values = np.zeros((num_lanes + 1, max_bias), np.float32)
        self._has_bias = np.zeros(num_lanes + 1, bool)
        self._full_mask = pack_mask(range(vocab_size), vocab_size)
        self._static: dict[int, Array] = {}  # lane -> mask of allowed_token_ids
        self._current: dict[int, Array] = {}  # lane -> static mask less what is forbidden now
        self._use_mask = np.zeros(num_lanes + 1, bool)

    def set(self, lane: int, params: SamplingParams, prompt_len: int, key: tuple[int, int]) -> None:
        """Give a lane to a sequence: everything the lane held before is replaced.

        Raises ValueError if params has more logit_bias entries than fit.
        """
        self.release(lane)
        values = {name: getattr(params, name) for name in _PLAIN if hasattr(params, name)}
        values["top_k"] = max(params.top_k, 0)
        values["top_p"] = max(params.top_p, _LEAST)
        values["repetition_penalty"] = min(max(params.repetition_penalty, _LEAST), 1 / _LEAST)
        values["prompt_len"] = prompt_len
        values["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        for name, value in values.items():
            self._plain[name][lane] = value
        self._key[lane] = key
        if params.logit_bias:
            self._set_bias(lane, params.logit_bias)
        if params.allowed_token_ids is not None:
            self._static[lane] = pack_mask(params.allowed_token_ids, self.vocab_size)
            self._use_mask[lane] = True

    def release(self, lane: int) -> None:
        """Take a lane back: it asks for nothing until it is set again."""
        for name, (_, nothing) in _PLAIN.items():
            self._plain[name][lane] = nothing
        if self._has_bias[lane]:
            self._bias_ids[lane] = -1
            self._has_bias[lane] = False
        self._static.pop(lane, None)
        self._current.pop(lane, None)
        self._use_mask[lane] = False

    def constrain(self, lane: int, mask: Array | None, forbidden: Sequence[int] | Array) -> None:
        """Say which tokens may come next to a lane, of those its allowed_token_ids allow, in place of what was said
        before.

        Args:
            lane: whose.
            mask: those that may, as `pack_mask` makes it; None for all.
            forbidden: those of them that may not, but where nothing else would be left. Ids >= V are ignored.
        """
        base = self._static.get(lane, self._full_mask)
        allowed = base if mask is None else base & mask
        ids = np.asarray(forbidden, np.int64)
        ids = ids[(ids >= 0) & (ids < self.vocab_size)]
        if ids.size:
            left = allowed.copy()
            np.bitwise_and.at(left, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
            allowed = left if left.any() else allowed
        if allowed is base:
            self._current.pop(lane, None)
            self._use_mask[lane] = lane in self._static
        else:
            self._current[lane] = allowed
            self._use_mask[lane] = True

    def take(self, lanes: Sequence[int] | Array, rows: int) -> dict[str, Array | None]:
        """Sampling settings of `lanes`, in order, padded to `rows` rows that are greedy and ask for nothing.

        Returns the fields of the device's SamplingInput by name, all but `history_len` and `position`, which
        the step knows. `bias_ids` and `bias_values`, and `allowed`, are None when no lane taken uses them.
        """
        index = np.full(rows, self._padding, np.intp)
        index[: len(lanes)] = lanes
        out: dict[str, Array | None] = {name: values[index] for name, values in self._plain.items()}
        out["key"] = self._key[index]
        biased = bool(self._has_bias[index].any())
        out["bias_ids"] = self._bias_ids[index] if biased else None
        out["bias_values"] = self._bias_values[index] if biased else None
        return out | self.take_masks(index)

    def take_masks(self, lanes: Array) -> dict[str, Array | None]:
        """The part of `take` that says which tokens may come; a lane past the end is padding."""
        use_mask = self._use_mask[lanes]
        return {"use_mask": use_mask, "allowed": self._masks(lanes) if use_mask.any() else None}

    def _set_bias(self, lane: int, bias: dict[int, float]) -> None:
        room = self._bias_ids.shape[1]
        if len(bias) > room:
            raise ValueError(f"logit_bias: {len(bias)} entries, at most {room} are supported")
        self._bias_ids[lane, : len(bias)] = list(bias.keys())
        self._bias_values[lane, : len(bias)] = list(bias.values())
        self._has_bias[lane] = True

    def _masks(self, index: Array) -> Array:
        masks = np.zeros((len(index), len(self._full_mask)), np.uint32)  # rows without a mask are not looked at
        for row in np.flatnonzero(self._use_mask[index]):
            lane = int(index[row])
            masks[row] = self._current[lane] if lane in self._current else self._static[lane]
        return masks


def pack_mask(token_ids: Iterable[int], vocab_size: int) -> Array:
    """Bit mask [ceil(V / 32)] uint32: bit i % 32 of word i // 32 is set for each id in token_ids below V."""
    ids = np.fromiter(token_ids, np.int64)
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)
