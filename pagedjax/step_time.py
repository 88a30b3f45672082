"""How long a step takes, as a function of its plan: what stands in the device's place in a simulation.

The form is linear, with coefficients of at least 0, in these features of a plan:

- ``steps``: 1, what every step costs;
- ``padded_tokens``: tokens computed, padded to the token bucket;
- ``decode_rows``: sequences with one token each;
- ``decode_context``: tokens that those attend to, themselves included, summed;
- ``prefill_attention``: pairs of a prefill chunk's token and a token it attends to;
- ``sampled_rows``: tokens drawn;
- ``copies``, ``transfers``: blocks copied on write; blocks moved to or from the swap space.

One such function gives the device's seconds, another the host's (planning, packing, committing). Coefficients are
fitted to steps that an engine has run, by least squares under the bound of 0 (Lawson and Hanson, *Solving Least
Squares Problems*, 1974, chapter 23).
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedjax.config import UserError
from pagedjax.scheduler import SchedulePlan

Array = npt.NDArray[np.float64]


class StepFeatures(NamedTuple):
    """What a step's time depends on; the module says what each means."""

    steps: float = 0.0
    padded_tokens: float = 0.0
    decode_rows: float = 0.0
    decode_context: float = 0.0
    prefill_attention: float = 0.0
    sampled_rows: float = 0.0
    copies: float = 0.0
    transfers: float = 0.0


class StepRecord(NamedTuple):
    """A step that an engine has run. Times in seconds."""

    features: StepFeatures
    device_seconds: float
    host_seconds: float


class StepRecorder:
    """Keeps a record of each step; it is what ``Engine.on_step`` wants.

    Args:
        token_buckets: what the engine pads tokens to, ascending.
    """

    def __init__(self, token_buckets: Sequence[int]):
        self.token_buckets = token_buckets
        self.records: list[StepRecord] = []

    def __call__(self, plan: SchedulePlan, device_seconds: float, host_seconds: float) -> None:
        """A step of this plan ended."""
        self.records.append(StepRecord(step_features(plan, self.token_buckets), device_seconds, host_seconds))

    def write(self, path: Path) -> None:
        """Write the records as JSON lines: the token buckets first, then a line per step.

        Raises:
            UserError: the file cannot be written.
        """
        lines = [json.dumps({"token_buckets": list(self.token_buckets)})]
        lines += [json.dumps(record._asdict() | {"features": record.features._asdict()}) for record in self.records]
        try:
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None


def step_features(plan: SchedulePlan, token_buckets: Sequence[int] = ()) -> StepFeatures:
    """The features of a plan. ``token_buckets``, ascending, are what tokens are padded to; none pads nothing."""
    decodes = len(plan.decodes)
    context = decodes + sum([share.start for share in plan.decodes])
    tokens, attention, sampled = decodes, 0, decodes
    for share in plan.prefills:
        count = share.num_tokens
        tokens += count
        attention += count * share.start + count * (count + 1) // 2
        sampled += share.samples
    bucket = bisect_left(token_buckets, tokens)
    padded = token_buckets[bucket] if bucket < len(token_buckets) else tokens
    return StepFeatures(1, padded, decodes, context, attention, sampled, len(plan.copies), len(plan.transfers))


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step on the device and on the host, per unit of each feature.

    Attributes:
        device, host: coefficients in seconds, all at least 0.
        token_buckets: what tokens are padded to, ascending; empty pads nothing.
    """

    device: StepFeatures
    host: StepFeatures = field(default_factory=StepFeatures)
    token_buckets: tuple[int, ...] = ()

    def __call__(self, plan: SchedulePlan) -> tuple[float, float]:
        """Seconds that the plan's step takes on the device, and on the host."""
        features = step_features(plan, self.token_buckets)
        return _dot(self.device, features), _dot(self.host, features)

    def as_dict(self) -> dict[str, Any]:
        """What ``load_step_time_model`` reads."""
        return {
            "token_buckets": list(self.token_buckets),
            "device": {name: value for name, value in self.device._asdict().items() if value},
            "host": {name: value for name, value in self.host._asdict().items() if value},
        }


def _dot(coefficients: StepFeatures, features: StepFeatures) -> float:
    return sum(map(mul, coefficients, features))


def fit_step_time_model(records: Sequence[StepRecord], token_buckets: Sequence[int] = ()) -> StepTimeModel:
    """The model whose predictions have the least squared error over these steps.

    A feature that no step has gets the coefficient 0: what was not measured takes no time.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("records must hold at least one step, got none")
    features = np.array([record.features for record in records], np.float64)
    device, host = (
        StepFeatures(*nonnegative_least_squares(features, np.array(seconds)).tolist())
        for seconds in ([r.device_seconds for r in records], [r.host_seconds for r in records])
    )
    return StepTimeModel(device, host, tuple(token_buckets))


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """``x >= 0`` with the least ``|matrix @ x - target|``, by the active-set method of Lawson and Hanson.

    Args:
        matrix: ``[n, k]``. Columns of zeros get 0.
        target: ``[n]``.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)  # features differ by many orders of magnitude
    x = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], bool)
    tolerance = 1e-10 * float(np.linalg.norm(target))
    for _ in range(10 * matrix.shape[1]):  # each round lowers the error; rounding alone could make it go in circles
        gradient = scaled.T @ (target - scaled @ x)
        candidates = ~free & (gradient > tolerance)
        if not candidates.any():
            break
        free[np.argmax(np.where(candidates, gradient, -np.inf))] = True
        while True:
            solution = np.zeros_like(x)
            solution[free] = np.linalg.lstsq(scaled[:, free], target)[0]
            negative = free & (solution <= 0)
            if not negative.any():
                break
            shrink = np.min(x[negative] / (x[negative] - solution[negative]))
            x += shrink * (solution - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = solution
    return x / np.where(norms > 0, norms, 1.0)


# ---- files ----


def load_step_time_model(path: Path) -> StepTimeModel:
    """A model from a file: one that was fitted (a JSON object, as ``as_dict`` gives it), or records to fit it to.

    Raises:
        UserError: the file cannot be read, or is neither; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the step times {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "device" in whole:
        return _parse(path, 1, text, _model)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if len(lines) < 2:
        raise UserError(f"the step times {path} hold neither a model nor a step: write them with --step-times")
    buckets = _parse(path, *lines[0], _buckets)
    return fit_step_time_model([_parse(path, *line, _record) for line in lines[1:]], buckets)


def _parse[T](path: Path, number: int, text: str, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        row = json.loads(text)
        if not isinstance(row, dict):
            raise ValueError("it is not a JSON object")
        return parse(row)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(f"{path} line {number}: {reason}") from None


def _model(row: dict[str, Any]) -> StepTimeModel:
    return StepTimeModel(_features(row["device"]), _features(row.get("host", {})), _buckets(row))


def _record(row: dict[str, Any]) -> StepRecord:
    return StepRecord(_features(row["features"]), _amount(row, "device_seconds"), _amount(row, "host_seconds"))


def _features(row: dict[str, Any]) -> StepFeatures:
    return StepFeatures(**{name: _amount(row, name) for name in row})


def _amount(row: dict[str, Any], name: str) -> float:
    value = row[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}, not a number of at least 0")
    return float(value)


def _buckets(row: dict[str, Any]) -> tuple[int, ...]:
    buckets = row.get("token_buckets", [])
    if not all(isinstance(bucket, int) for bucket in buckets) or list(buckets) != sorted(buckets):
        raise ValueError(f"token_buckets is {buckets!r}, not a list of ascending whole numbers")
    return tuple(buckets)
