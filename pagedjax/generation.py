"""What the host keeps of a running request: its sequences' text, log-probabilities, stop conditions and moments."""

import dataclasses
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from pagedjax.config import SamplingParams
from pagedjax.grammars import GrammarState
from pagedjax.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Sequence
from pagedjax.text import TextStream
from pagedjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenResult:
    """One sampled token with its log-probabilities as the device gave them: plain numbers, ``top`` best first."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


class Generation:
    """One sequence being generated: takes its tokens, gives its text, knows when it ends.

    Attributes:
        sequence: what the scheduler sees of it.
        device_params: the parameters as the device gets them.
        key: the random key of its draws, two 32-bit words.
        grammar: how far it has come in what its output must look like; None where anything may come.
        needs_last_token: whether what may come next depends on the last token, so that it must be known on the host.
        finish_reason: stop, length, abort, error; None while it runs.
        stop_reason: the stop string or token that ended it.
    """

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: ListLike[int],
        key: tuple[int, int],
        bad_words: ListLike[list[int]] = (),
        grammar: GrammarState | None = None,
    ):
        if params.stop and tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this model has none")
        self.sequence = sequence
        self.params = params
        # The best of several samples are told apart by their log-probabilities.
        ranked = params.num_samples > params.n and params.logprobs is None
        self.device_params = dataclasses.replace(params, logprobs=0) if ranked else params
        self.key = key
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0
        self.last_token_time: float | None = None
        self._tokenizer = tokenizer
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stops = self._eos | frozenset(params.stop_token_ids)
        self._bad_words = bad_words
        self.grammar = grammar
        self.needs_last_token = grammar is not None or any(len(word) > 1 for word in self._bad_words)
        self._text = TextStream(
            tokenizer,
            sequence.token_ids,
            stop=tuple(params.stop),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._new_tokens: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[dict[int, Logprob]] = []

    def forbidden(self, num_output: int) -> list[int]:
        """Tokens that may not come as output token ``num_output``: ends before ``min_tokens``, ends of bad words."""
        tokens = list(self._stops) if num_output < self.params.min_tokens else []
        known = self.sequence.token_ids
        for *head, last in self._bad_words:
            if not head or known[-len(head) :] == head:
                tokens.append(last)
        return tokens

    @property
    def has_constraints(self) -> bool:
        """Whether ``grammar`` and ``forbidden`` have to be asked before each token."""
        return self.grammar is not None or bool(self._bad_words) or self.params.min_tokens > 0

    def take(self, result: TokenResult) -> None:
        """Commit the next token: text, log-probabilities, and whether it ends the sequence."""
        token, params = result.token_id, self.params
        self.sequence.token_ids.append(token)
        self._new_tokens.append(token)
        self.cumulative_logprob += result.logprob
        count = len(self.sequence.token_ids) - self.sequence.num_prompt
        if params.logprobs is not None:
            self._new_logprobs.append(logprob_entry(result, params.logprobs, self._tokenizer))
        may_stop = count > params.min_tokens
        if token in self._stops and may_stop:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self._eos else token
            if params.include_stop_str_in_output:
                self._new_text.append(self._text.push(token, stops_allowed=False))
        else:
            if self.grammar:
                self.grammar.accept(token)
            self._new_text.append(self._text.push(token, stops_allowed=may_stop))
            if self._text.stop_reason is not None:
                self.finish_reason, self.stop_reason = "stop", self._text.stop_reason
            elif self.grammar and self.grammar.is_finished:
                self.finish_reason = "stop"
            elif count >= self.sequence.max_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            self._new_text.append(self._text.finish())

    def end(self, reason: str) -> None:
        """End it from outside, with the text that was held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self._new_text.append(self._text.finish())

    def delta(self) -> CompletionOutput | None:
        """What is new since the last call; None for nothing."""
        if not self._new_tokens and not self.finish_reason:
            return None
        output = CompletionOutput(
            index=self.sequence.index,
            text="".join(self._new_text),
            token_ids=self._new_tokens,
            cumulative_logprob=None if self.params.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.params.logprobs is None else self._new_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._new_tokens, self._new_text, self._new_logprobs = [], [], []
        return output


class RunningRequest:
    """A request with its generations, until the last of them has ended and been reported."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        now: float,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.generations: list[Generation] = []
        self.metrics = RequestMetrics(arrival_time=now)
        self.error: str | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.missing_prompt_logprobs: set[int] = set()  # positions
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(prompt_token_ids)
            self.missing_prompt_logprobs = set(range(1, len(prompt_token_ids)))
        self._reported: set[int] = set()  # indexes of generations whose last delta was given
        self._prompt_reported = False

    @property
    def finished(self) -> bool:
        """Whether every generation has ended."""
        return all(g.finish_reason for g in self.generations)

    def take_prompt(self, position: int, results: ListLike[TokenResult], tokenizer: Tokenizer | None) -> None:
        """Commit the prompt's log-probabilities from ``position`` on; after a preemption some come twice, the same."""
        assert self.prompt_logprobs is not None, "only requests that ask get any"
        for at, result in enumerate(results, start=position):
            self.prompt_logprobs[at] = logprob_entry(result, self.params.prompt_logprobs or 0, tokenizer)
            self.missing_prompt_logprobs.discard(at)

    def delta(self) -> RequestOutput | None:
        """What is new since the last call; None for nothing. Of ``best_of`` samples the best ``n`` come at the end."""
        if self.params.num_samples > self.params.n and not self.error:
            outputs = self._best() if self.finished else []
        else:
            found = [(g, g.delta()) for g in self.generations if g.sequence.index not in self._reported]
            self._reported |= {g.sequence.index for g, _ in found if g.finish_reason}
            outputs = [output for _, output in found if output]
        if not outputs and not self.finished:
            return None
        prompt_logprobs = self.prompt_logprobs
        if self.missing_prompt_logprobs or self._prompt_reported:
            prompt_logprobs = None
        self._prompt_reported |= prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.generations[0].sequence.num_cached,
            metrics=self.metrics,
            error=self.error,
        )

    def failure(self) -> RequestOutput:
        """The last word where ``delta`` itself raises: how each sample ended that had not, without its text."""
        left = [g for g in self.generations if g.sequence.index not in self._reported]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[CompletionOutput(index=g.sequence.index, finish_reason=g.finish_reason) for g in left],
            finished=True,
            metrics=self.metrics,
            error=self.error,
        )

    def _best(self) -> list[CompletionOutput]:
        ranked = sorted(self.generations, key=lambda g: (-g.cumulative_logprob, g.sequence.index))
        outputs = []
        for index, generation in enumerate(ranked[: self.params.n]):
            output = generation.delta()
            assert output is not None, "a finished generation always has a last delta"
            output.index = index
            outputs.append(output)
        return outputs


def logprob_entry(result: TokenResult, num_top: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The sampled token's log-probability, and those of the ``num_top`` best tokens, by token id."""

    def text(token_id: int) -> str | None:
        return tokenizer.token_text(token_id) if tokenizer else None

    entry = {result.token_id: Logprob(result.logprob, result.rank, text(result.token_id))}
    for rank, (token_id, logprob) in enumerate(result.top[:num_top], start=1):
        if token_id >= 0 and token_id != result.token_id:
            entry[token_id] = Logprob(logprob, rank, text(token_id))
    return entry


def tokenize_bad_words(words: ListLike[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each word's tokens, at the start of a text and after a space, as vLLM bans them."""
    if not words:
        return []
    if tokenizer is None:
        raise ValueError("bad_words needs a tokenizer, and this model has none")
    spellings = [
        tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False) for word in words for prefix in ("", " ")
    ]
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in spellings if ids)]
