"""The host's sampling settings: what the device reads of them, masks, bias and keys."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedjax.config import SamplingParams
from pagedjax.sampling import SamplingInput
from pagedjax.sampling_rows import SamplingRows, derive_key, pack_mask

DEVICE = {  # what the device takes for "nothing asked"
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
    "repetition_penalty": (np.float32, 1),
    "num_logprobs": (np.int32, -1),
}


def take(rows: SamplingRows, lanes: list[int], count: int) -> dict[str, Any]:
    return dict(rows.take(lanes, count))


def test_rows_hold_what_the_device_reads() -> None:
    rows = SamplingRows(num_lanes=6, vocab_size=100, max_bias=4)
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.5, logprobs=3)
    rows.set(2, params, prompt_len=11, key=(5, 6))
    rows.set(4, SamplingParams(), prompt_len=3, key=(7, 8))
    taken = take(rows, [4, 2], 8)
    assert taken["bias_ids"] is None
    assert taken["allowed"] is None
    fields = {field.name for field in dataclasses.fields(SamplingInput)}
    assert set(taken) == fields - {"history_len", "position"}
    for name, (dtype, nothing) in DEVICE.items():
        assert taken[name].dtype == dtype, name
        np.testing.assert_array_equal(taken[name][2:], np.full(6, nothing), err_msg=name)
    assert taken["key"].dtype == np.uint32
    assert not taken["use_mask"].any()
    np.testing.assert_allclose(taken["temperature"][:2], [1.0, 0.5])
    np.testing.assert_array_equal(taken["top_k"][:2], [0, 7])
    np.testing.assert_array_equal(taken["num_logprobs"][:2], [-1, 3])
    np.testing.assert_array_equal(taken["prompt_len"][:2], [3, 11])
    np.testing.assert_array_equal(taken["key"][:2], [[7, 8], [5, 6]])
    rows.release(2)
    released = take(rows, [2], 8)
    np.testing.assert_array_equal(released["temperature"], 0)


def allowed_ids(mask: npt.NDArray[np.uint32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")).tolist())


def test_masks_and_bias_of_a_lane() -> None:
    rows = SamplingRows(num_lanes=3, vocab_size=70, max_bias=2)
    rows.set(0, SamplingParams(allowed_token_ids=[1, 40, 69, 70, 5000]), prompt_len=1, key=(0, 0))
    rows.set(1, SamplingParams(logit_bias={3: 1.5, 9: -2.0}), prompt_len=1, key=(0, 0))
    rows.constrain(1, None, [0, 69, 64, 1000])
    taken = take(rows, [0, 1], 3)
    assert taken["use_mask"].tolist() == [True, True, False]
    assert allowed_ids(taken["allowed"][0]) == {1, 40, 69}
    assert allowed_ids(taken["allowed"][1]) == set(range(70)) - {0, 69, 64}
    assert taken["bias_ids"].tolist() == [[-1, -1], [3, 9], [-1, -1]]
    assert taken["bias_values"][1].tolist() == [1.5, -2.0]
    rows.constrain(0, None, [40])
    assert allowed_ids(take(rows, [0], 1)["allowed"][0]) == {1, 69}
    rows.constrain(0, pack_mask([0, 1, 40], 70), [1])
    assert allowed_ids(take(rows, [0], 1)["allowed"][0]) == {40}
    rows.constrain(0, pack_mask([0, 1, 40], 70), [1, 40])  # nothing would be left
    assert allowed_ids(take(rows, [0], 1)["allowed"][0]) == {1, 40}
    rows.constrain(2, pack_mask([7], 70), [])
    masks: Any = rows.take_masks(np.array([2, 3, 1]))
    assert masks["use_mask"].tolist() == [True, False, True]
    assert allowed_ids(masks["allowed"][0]) == {7}
    rows.constrain(0, None, [])
    rows.constrain(1, None, [])
    assert allowed_ids(take(rows, [0], 1)["allowed"][0]) == {1, 40, 69}
    assert take(rows, [1], 1)["allowed"] is None
    rows.set(1, SamplingParams(), prompt_len=1, key=(0, 0))
    assert take(rows, [1], 1)["bias_ids"] is None
    with pytest.raises(ValueError, match="logit_bias"):
        rows.set(1, SamplingParams(logit_bias={1: 1.0, 2: 1.0, 3: 1.0}), prompt_len=1, key=(0, 0))


def test_derived_keys() -> None:
    assert derive_key(0x123456789ABCDEF0, 0) == (0x12345678, 0x9ABCDEF0)
    assert derive_key(-1, 0) == (2**32 - 1, 2**32 - 1)
    keys = {derive_key(seed, index) for seed in (0, 1, 2**63, -5) for index in range(128)}
    assert len(keys) == 4 * 128
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert derive_key(7, 3) == derive_key(7, 3)
