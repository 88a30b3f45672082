"""A request that is a beam search: its sequences are the beams, which fork and end as the search decides."""

import itertools
from dataclasses import dataclass

from pagedjax.beam import BeamSearch, Hypothesis
from pagedjax.config import BeamSearchParams, SamplingParams
from pagedjax.generation import TokenResult
from pagedjax.request import CompletionOutput, RequestMetrics, RequestOutput, Sequence
from pagedjax.tokenizer import Tokenizer


class Beam:
    """One running beam; the engine handles it as it does any ``Generation``.

    Attributes:
        sequence: what the scheduler sees of it.
        device_params: the parameters as the device gets them: the best tokens' log-probabilities, no chance.
        candidates: the best next tokens with their log-probabilities, once a step has given them.
        finish_reason: how it ended; None while it runs.
    """

    has_constraints = needs_last_token = False
    grammar = None
    key = (0, 0)

    def __init__(self, sequence: Sequence, device_params: SamplingParams):
        self.sequence, self.device_params = sequence, device_params
        self.candidates: list[tuple[int, float]] | None = None
        self.finish_reason: str | None = None
        self.last_token_time: float | None = None
        # Which token comes next is known on the host only, once every beam has given its candidates.
        sequence.waits_for_token = True

    def take(self, result: TokenResult) -> None:
        """Commit what a step found; the beam pauses until the search has decided."""
        self.candidates = [(token_id, logprob) for token_id, logprob in result.top if token_id >= 0]
        self.sequence.is_paused = True

    def forbidden(self, num_output: int) -> list[int]:
        """The search itself leaves out what it does not want."""
        return []

    def go_on(self, token_id: int) -> None:
        """The search continues this beam with a token."""
        self.sequence.token_ids.append(token_id)
        self.sequence.is_paused = False
        self.candidates = None

    def end(self, reason: str) -> None:
        """It runs no more."""
        self.finish_reason = self.finish_reason or reason


@dataclass(frozen=True)
class BeamRound:
    """What the search has decided: beams that end, and beams that fork, as (parent, child)."""

    ended: list[Beam]
    forks: list[tuple[Beam, Beam]]


class BeamRequest:
    """A beam search from its prompt to its hypotheses, with the interface of ``RunningRequest``.

    Args:
        sequence: the prompt's.
        search: decides.
        num_logprobs: best tokens that a step gives of each beam, at least ``search.num_candidates``.
        tokenizer: None for a model without one; text stays empty then.
        now: when it came, in seconds.
    """

    prompt_logprobs = None
    missing_prompt_logprobs: frozenset[int] = frozenset()

    def __init__(
        self,
        sequence: Sequence,
        prompt: str | None,
        params: BeamSearchParams,
        search: BeamSearch,
        num_logprobs: int,
        tokenizer: Tokenizer | None,
        now: float,
    ):
        self.request_id, self.prompt, self.params = sequence.request_id, prompt, params
        self.prompt_token_ids = list(sequence.token_ids)
        self.metrics = RequestMetrics(arrival_time=now)
        self.error: str | None = None
        self.generations = [Beam(sequence, SamplingParams(temperature=0, logprobs=num_logprobs))]
        self._search, self._tokenizer = search, tokenizer
        self._indexes = itertools.count(1)
        self._num_cached = 0

    @property
    def finished(self) -> bool:
        """Whether the search is over."""
        return all(beam.finish_reason for beam in self.generations)

    def advance(self) -> BeamRound | None:
        """Let the search decide; None while a beam's candidates are still to come."""
        candidates = [beam.candidates for beam in self.generations]
        if self.finished or any(of_beam is None for of_beam in candidates):
            return None
        self._num_cached = max(self._num_cached, *(beam.sequence.num_cached for beam in self.generations))
        moves = self._search.advance([of_beam for of_beam in candidates if of_beam is not None])
        if not moves:
            for beam in self.generations:
                beam.end("stop")
            return BeamRound(self.generations, [])
        before, kept = self.generations, set[int]()
        self.generations, forks, tokens = [], [], []
        for move in moves:
            beam = parent = before[move.parent]
            if move.parent in kept:
                beam = self._child(parent, move.token_id)
                forks.append((parent, beam))
            else:
                tokens.append((parent, move.token_id))
            kept.add(move.parent)
            self.generations.append(beam)
        for beam, token_id in tokens:  # only now: a parent's children begin with the tokens it had
            beam.go_on(token_id)
        return BeamRound([beam for index, beam in enumerate(before) if index not in kept], forks)

    def take_prompt(self, position: int, results: list[TokenResult], tokenizer: Tokenizer | None) -> None:
        """Never asked for."""
        raise AssertionError("a beam search asks for no log-probabilities of its prompt")

    def delta(self) -> RequestOutput | None:
        """The hypotheses, when the search is over; None before."""
        return self._output([] if self.error else self._search.hypotheses()) if self.finished else None

    def failure(self) -> RequestOutput:
        """The last word where ``delta`` itself raises."""
        return self._output([])

    def _child(self, parent: Beam, token_id: int) -> Beam:
        of_parent = parent.sequence
        sequence = Sequence(
            request_id=self.request_id,
            index=next(self._indexes),
            token_ids=[*of_parent.token_ids, token_id],
            num_prompt=of_parent.num_prompt,
            max_tokens=of_parent.max_tokens,
            priority=of_parent.priority,
        )
        return Beam(sequence, parent.device_params)

    def _output(self, hypotheses: list[Hypothesis]) -> RequestOutput:
        outputs = [self._completion(index, hypothesis) for index, hypothesis in enumerate(hypotheses)]
        if self.error:
            outputs = [CompletionOutput(index=0, finish_reason="error")]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self._num_cached,
            metrics=self.metrics,
            error=self.error,
        )

    def _completion(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        text = hypothesis.token_ids[:-1] if hypothesis.finish_reason == "stop" else hypothesis.token_ids
        return CompletionOutput(
            index=index,
            text=self._tokenizer.decode(text, skip_special_tokens=True) if self._tokenizer else "",
            token_ids=hypothesis.token_ids,
            cumulative_logprob=hypothesis.cumulative_logprob,
            finish_reason=hypothesis.finish_reason,
        )
