"""The model of a step's time: its features, its fit, its files."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pagedjax.block_tables import BlockCopy
from pagedjax.config import UserError
from pagedjax.request import Sequence
from pagedjax.scheduler import ScheduledSequence, SchedulePlan
from pagedjax.step_time import (
    StepFeatures,
    StepRecord,
    StepRecorder,
    StepTimeModel,
    fit_step_time_model,
    load_step_time_model,
    nonnegative_least_squares,
    step_features,
)
from pagedjax.swap_space import Transfer

DEVICE = StepFeatures(0.01, 1e-4, 2e-4, 1e-6, 3e-8, 5e-4, 1e-3, 2e-3)
HOST = StepFeatures(steps=0.002, decode_rows=1e-5)


def share(start: int, num_tokens: int, samples: bool) -> ScheduledSequence:
    sequence = Sequence("r", 0, [], 0, 1)
    return ScheduledSequence(sequence, start, num_tokens, first_write=start, samples=samples, num_again=0)


PLAN = SchedulePlan(
    decodes=[share(9, 1, True), share(0, 1, True)],
    prefills=[share(0, 3, False), share(4, 2, True)],
    copies=[BlockCopy(0, 1)],
    transfers=[Transfer(0, 0, True), Transfer(1, 1, False)],
)


def test_features_of_a_plan() -> None:
    # Decodes see 10 and 1 tokens; the chunks 1 + 2 + 3 and 5 + 6.
    expected = StepFeatures(1, 7, 2, 11, 17, 3, 1, 2)
    assert step_features(PLAN) == expected
    assert step_features(PLAN, (4, 8, 16)) == expected._replace(padded_tokens=8)
    assert step_features(PLAN, (4,)) == expected, "beyond the largest bucket nothing is known of padding"
    model = StepTimeModel(DEVICE, HOST, (8,))
    device, host = model(PLAN)
    assert device == pytest.approx(0.01 + 8e-4 + 4e-4 + 11e-6 + 51e-8 + 15e-4 + 1e-3 + 4e-3)
    assert host == pytest.approx(0.002 + 2e-5)


def random_records(count: int, seed: int = 0) -> list[StepRecord]:
    """Steps that take just what ``DEVICE`` and ``HOST`` say."""
    random = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        values = random.integers(0, [2, 512, 64, 30_000, 10**6, 64, 5, 5]).tolist()
        features = StepFeatures(*[1, *values[1:]])
        seconds = [float(np.dot(coefficients, features)) for coefficients in (DEVICE, HOST)]
        records.append(StepRecord(features, *seconds))
    return records


def test_a_fit_finds_the_coefficients_that_made_the_times() -> None:
    model = fit_step_time_model(random_records(60), (8, 16))
    assert model.device == pytest.approx(DEVICE, rel=1e-6, abs=1e-12)
    assert model.host == pytest.approx(HOST, rel=1e-6, abs=1e-12)
    assert model.token_buckets == (8, 16)


def test_what_no_step_had_takes_no_time() -> None:
    records = [r._replace(features=r.features._replace(copies=0)) for r in random_records(60)]
    assert fit_step_time_model(records).device.copies == 0
    with pytest.raises(ValueError, match="records"):
        fit_step_time_model([])


@given(st.data())
def test_no_feasible_direction_lowers_the_error(data: st.DataObject) -> None:
    """The conditions of Karush, Kuhn and Tucker: nothing to gain by raising any entry, nor by lowering one above 0."""
    rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    values = st.floats(-100, 100, width=16)
    matrix = data.draw(arrays.arrays(np.float64, (rows, columns), elements=values))
    target = data.draw(arrays.arrays(np.float64, rows, elements=values))
    x = nonnegative_least_squares(matrix, target)
    assert (x >= 0).all()
    norms = np.linalg.norm(matrix, axis=0)
    gradient = matrix.T @ (target - matrix @ x) / np.where(norms > 0, norms, 1)
    slack = 1e-6 * (1 + np.linalg.norm(target))
    assert (gradient <= slack).all()
    assert (np.abs(gradient[x * norms > 1e-6]) <= slack).all()


def test_files(tmp_path: Path) -> None:
    recorder = StepRecorder((8, 16))
    recorder(PLAN, 0.5, 0.25)
    recorder.write(tmp_path / "steps.jsonl")
    assert recorder.records == [StepRecord(step_features(PLAN, (8, 16)), 0.5, 0.25)]
    fitted = load_step_time_model(tmp_path / "steps.jsonl")
    assert fitted == fit_step_time_model(recorder.records, (8, 16))
    assert fitted(PLAN) == pytest.approx((0.5, 0.25))
    (tmp_path / "model.json").write_text(json.dumps(fitted.as_dict(), indent=2))
    assert load_step_time_model(tmp_path / "model.json") == fitted
    with pytest.raises(UserError, match="cannot be written"):
        recorder.write(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "neither a model nor a step"),
        ('{"token_buckets": [8]}', "neither a model nor a step"),
        ('{"device": {"steps": -1}}', "line 1: steps is -1, not a number"),
        ('{"device": {"speed": 1}}', "line 1: .*speed"),
        ('{"device": {}, "token_buckets": [8, 4]}', "line 1: token_buckets"),
        ('{"token_buckets": []}\n{"features": {}, "device_seconds": 1}', "line 2: 'host_seconds' is missing"),
        ('{"token_buckets": []}\n{"features": {}, "device_seconds": "x", "host_seconds": 0}', "line 2: device_sec"),
        ('{"token_buckets": []}\n\n[', "line 3"),
        ("[]\n[]", "line 1"),
    ],
)  # fmt: skip
def test_malformed_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(UserError, match=message):
        load_step_time_model(tmp_path / "t")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_step_time_model(tmp_path / "none")
