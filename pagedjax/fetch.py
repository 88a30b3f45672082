"""From a step's output on the device to plain numbers, for those who asked."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from pagedjax.beam_request import Beam, BeamRequest
from pagedjax.generation import Generation, RunningRequest, TokenResult
from pagedjax.request import Sequence
from pagedjax.scheduler import ScheduledSequence, SchedulePlan
from pagedjax.step import StepOutput

_Arrays = tuple[np.ndarray, ...]  # log-probabilities, ranks, top ids, top log-probabilities
ShareResult = tuple[ScheduledSequence, TokenResult | None, list[TokenResult]]  # its token; its prompt's


@dataclass(frozen=True)
class StepInFlight:
    """A dispatched step.

    Attributes:
        plan: what it computes.
        output: on the device, perhaps not there yet.
        prompt_counts: prompt log-probabilities wanted of each share, in the plan's order.
        dispatched: when, in seconds.
    """

    plan: SchedulePlan
    output: StepOutput
    prompt_counts: tuple[int, ...]
    dispatched: float

    def wait(self) -> None:
        """Until the step has ended; raises what went wrong on the device."""
        jax.block_until_ready(self.output.samples or self.output.prompt)


def fetch(
    step: StepInFlight, generations: Mapping[Sequence, tuple[RunningRequest | BeamRequest, Generation | Beam]]
) -> list[ShareResult]:
    """Bring a step's results to the host: tokens always, log-probabilities where someone asked for them."""
    samples, prompt = step.output.samples, step.output.prompt
    found = [generations.get(share.sequence) for share in step.plan]
    tokens: list[int] = np.asarray(samples.tokens).tolist() if samples else []
    sampled: _Arrays | None = None
    if samples and any(entry and entry[1].device_params.logprobs is not None for entry in found):
        sampled = _on_host(samples.logprobs, samples.rank, samples.top_ids, samples.top_logprobs)
    prompts: _Arrays | None = None
    if any(step.prompt_counts):
        prompts = _on_host(prompt.logprobs, prompt.ranks, prompt.top_ids, prompt.top_logprobs)
    row, prompt_row = itertools.count(), 0
    results: list[ShareResult] = []
    for share, entry, count in zip(step.plan, found, step.prompt_counts, strict=True):
        result, of_prompt = None, []
        if share.samples:
            at = next(row)
            result = _result(tokens[at], sampled, at) if sampled else TokenResult(tokens[at])
        if entry and prompts:
            targets = entry[0].prompt_token_ids[share.start + 1 : share.start + 1 + count]
            of_prompt = [_result(token, prompts, prompt_row + i) for i, token in enumerate(targets)]
        prompt_row += count
        results.append((share, result, of_prompt))
    return results


def _on_host(*arrays: jax.Array) -> _Arrays:
    return tuple(np.asarray(array) for array in arrays)


def _result(token_id: int, arrays: _Arrays, row: int) -> TokenResult:
    logprobs, ranks, top_ids, top_logprobs = arrays
    top = tuple(zip(top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True))
    return TokenResult(token_id, float(logprobs[row]), int(ranks[row]), top)
