"""Beam search over one prompt: which beams run next, which have finished, and when to stop.

It only decides. Whoever runs the model hands in each running beam's best tokens and gets back, beam by beam, whom to
continue with which token. The results are those of Hugging Face's ``generate(num_beams=)`` (transformers 5,
``GenerationMixin._beam_search``), in its float32 arithmetic; equal totals rank by beam, then by token id.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pagedjax.config import BeamSearchParams


@dataclass(frozen=True, slots=True)
class BeamMove:
    """One of the beams to run next: the running beam ``parent``, continued with ``token_id``."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam.

    ``token_ids`` are the output's, the end token included where there is one; ``cumulative_logprob`` is the sum of
    their log-probabilities, ``score`` that sum over ``len(token_ids) ** length_penalty``; ``finish_reason`` is
    ``"stop"`` (an end token) or ``"length"``.
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class _Beam:
    """A running beam: its last token behind those of its parent, so that beams share what they have in common."""

    logprob: float  # of all its tokens; a float32's value
    token_id: int = -1
    parent: "_Beam | None" = None  # None before the first token

    def token_ids(self) -> list[int]:
        tokens, beam = [], self
        while beam.parent is not None:
            tokens.append(beam.token_id)
            beam = beam.parent
        return tokens[::-1]


class BeamSearch:
    """The state of one prompt's search.

    Each round ranks every continuation of every running beam by the sum of its log-probabilities. Those among the
    first ``beam_width`` that end in an end token (all of these, at ``max_tokens``) are finished, and the best
    ``beam_width`` finished ones by score are kept; an end token that ranks lower is dropped. The best ``beam_width``
    others run on. The search is over at ``max_tokens``, or once ``beam_width`` have finished and

    - ``early_stopping`` is True; or
    - it is False, and the best running beam, scored at its present length, beats no finished one; or
    - it is ``"never"``, and that beam beats none scored at the length that suits it best: ``max_tokens`` for a
      positive length penalty, else the present one.

    A width of 1 is greedy search, as in Hugging Face: it is over at the first end token whatever ``early_stopping``.

    A vocabulary too small to fill the beams leaves fewer of them. (Hugging Face fills up with copies of the prompt
    scored -1e9. It takes -1e9 for the score of no hypothesis, too; here no score is too low to be kept.)

    Args:
        params: the search's settings; ``ignore_eos`` makes every token an ordinary one.
        eos_token_ids: the end tokens.
        max_tokens: the output's greatest length in tokens, at least 1. It stands beside ``params.max_tokens``
            because a model's length may leave less room than was asked for.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int], max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = True if params.beam_width == 1 else params.early_stopping
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_tokens = max_tokens
        self._length = 0  # tokens in every running beam
        self._running = [_Beam(0.0)]
        self._finished: list[Hypothesis] = []  # best first

    @property
    def num_candidates(self) -> int:
        """Best tokens needed of each running beam, or the whole vocabulary where it has fewer.

        No beam continues with more than ``beam_width`` tokens, and only end tokens can stand between them. Hugging
        Face takes ``max(2, 1 + end tokens) * beam_width`` of all beams together, to the same result.
        """
        return self._width + len(self._eos_token_ids)

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[BeamMove]:
        """Take one step: the beams to run next, best first and at most ``beam_width``; none when the search is over.

        Args:
            candidates: for each running beam, in the order of the last moves (one beam, the prompt, before the
                first call), the ids and float32 log-softmax of its best ``num_candidates`` tokens or more, best
                first. Tokens of probability 0 are never chosen.

        Raises:
            ValueError: there is not one list of candidates for each running beam.
        """
        if len(candidates) != len(self._running):
            raise ValueError(f"candidates must be of {len(self._running)} running beams, got {len(candidates)}")
        ranked = sorted(
            (-float(np.float32(beam.logprob) + np.float32(logprob)), parent, token_id)
            for parent, beam in enumerate(self._running)
            for token_id, logprob in candidates[parent]
            if logprob > -np.inf
        )
        self._length += 1
        at_max_tokens = self._length == self._max_tokens
        moves: list[BeamMove] = []
        running: list[_Beam] = []
        for rank, (negated, parent, token_id) in enumerate(ranked):
            beam = _Beam(-negated, token_id, self._running[parent])
            ended = token_id in self._eos_token_ids
            if rank < self._width and (ended or at_max_tokens):
                self._finished.append(self._hypothesis(beam, "stop" if ended else "length"))
            elif not ended and len(moves) < self._width:
                moves.append(BeamMove(parent, token_id))
                running.append(beam)
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._width :]
        if at_max_tokens or not running or self._is_decided(running[0]):
            moves, running = [], []
        self._running = running
        return moves

    def hypotheses(self) -> list[Hypothesis]:
        """The best ``beam_width`` hypotheses that have finished, best first: the result once the search is over."""
        return list(self._finished)

    def _hypothesis(self, beam: _Beam, finish_reason: str) -> Hypothesis:
        return Hypothesis(beam.token_ids(), beam.logprob, self._score(beam, self._length), finish_reason)

    def _score(self, beam: _Beam, length: int) -> float:
        return float(np.float32(beam.logprob) / np.float32(length**self._length_penalty))

    def _is_decided(self, best_running: _Beam) -> bool:
        """Whether the finished hypotheses are the result, as far as ``early_stopping`` wants to know."""
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        at_its_longest = self._early_stopping == "never" and self._length_penalty > 0
        possible = self._score(best_running, self._max_tokens if at_its_longest else self._length)
        return possible <= self._finished[-1].score
