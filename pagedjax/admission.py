"""From a call to a request that the scheduler can take: checked, seeded, and with its sequences.

Requests that the engine could never finish are refused here, before they are queued. Every error's message begins with
the field at fault.
"""

from collections.abc import Sequence as ListLike

import numpy as np

from pagedjax.beam import BeamSearch
from pagedjax.beam_request import BeamRequest
from pagedjax.block_keys import root_key
from pagedjax.config import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from pagedjax.generation import Generation, RunningRequest, tokenize_bad_words
from pagedjax.grammars import Grammar, Grammars
from pagedjax.request import Sequence
from pagedjax.sampling_rows import derive_key
from pagedjax.scheduler import Scheduler
from pagedjax.sizing import EngineSizes
from pagedjax.tokenizer import Tokenizer

Request = RunningRequest | BeamRequest


class Admission:
    """Makes an engine's requests.

    Args:
        scheduler: whose pool and lanes there are.
        sizes: of the engine.
        vocab_size: token ids are below this.
        tokenizer: None for a model without one.
        eos_token_ids: tokens that end a sequence.
        grammars: compiles what structured outputs are to look like.
        prefix_caching: whether requests share blocks.
        seed: where requests without a seed of their own get theirs from.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sizes: EngineSizes,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: ListLike[int],
        grammars: Grammars,
        prefix_caching: bool,
        seed: int,
    ):
        self._scheduler, self._sizes, self._vocab_size = scheduler, sizes, vocab_size
        self._tokenizer, self._eos = tokenizer, tuple(eos_token_ids)
        self._grammars, self._prefix_caching = grammars, prefix_caching
        self._seeds = np.random.default_rng(seed)

    def request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None,
        cache_salt: str | None,
        now: float,
        grammar: Grammar | None = None,
    ) -> Request:
        """A request that came at ``now`` (seconds), not queued yet; ``grammar`` is its own, if it is compiled already.

        Raises:
            ValueError: it can't be served.
        """
        if isinstance(params, SamplingParams):
            return self._sampled(request_id, prompt_token_ids, params, prompt, cache_salt, now, grammar)
        return self._searched(request_id, prompt_token_ids, params, prompt, cache_salt, now)

    def _sampled(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        salt: str | None,
        now: float,
        grammar: Grammar | None,
    ) -> RunningRequest:
        max_tokens = self._max_tokens(ids, params.max_tokens)
        self._check(params)
        if grammar is None and params.structured_outputs is not None:
            grammar = self._grammars.compile(params.structured_outputs)
        request = RunningRequest(request_id, prompt, ids, params, now)
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        bad_words = tokenize_bad_words(params.bad_words, self._tokenizer)
        for index in range(params.num_samples):
            sequence = Sequence(
                request_id=request_id,
                index=index,
                token_ids=list(ids),
                num_prompt=len(ids),
                max_tokens=max_tokens,
                priority=params.priority,
                root_key=self._root_key(request_id, salt, params.num_samples),
                reads_cache=index > 0 or params.prompt_logprobs is None,
                keeps_history=params.has_penalties,
            )
            key = derive_key(seed, index)
            state = grammar.start() if grammar else None
            request.generations.append(Generation(sequence, params, self._tokenizer, self._eos, key, bad_words, state))
        return request

    def _searched(
        self,
        request_id: str,
        ids: list[int],
        params: BeamSearchParams,
        prompt: str | None,
        salt: str | None,
        now: float,
    ) -> BeamRequest:
        max_tokens = self._max_tokens(ids, params.max_tokens)
        search = BeamSearch(params, self._eos, max_tokens)
        self._check_beams(params.beam_width, search.num_candidates, len(ids), max_tokens)
        sequence = Sequence(
            request_id=request_id,
            index=0,
            token_ids=list(ids),
            num_prompt=len(ids),
            max_tokens=max_tokens,
            root_key=self._root_key(request_id, salt, params.beam_width),
        )
        return BeamRequest(sequence, prompt, params, search, MAX_LOGPROBS, self._tokenizer, now)

    def _root_key(self, request_id: str, cache_salt: str | None, num_sequences: int) -> bytes | None:
        """Whom a request's sequences share blocks with: everybody of the same salt, each other, or nobody."""
        if self._prefix_caching:
            return root_key(cache_salt)
        return root_key(f"request {request_id}") if num_sequences > 1 or self._sizes.swap_blocks else None

    def _max_tokens(self, prompt_token_ids: ListLike[object], max_tokens: int | None) -> int:
        """The most output tokens that a request may have; None asks for as many as fit."""
        count, limit = len(prompt_token_ids), self._sizes.max_model_len
        if not count:
            raise ValueError("prompt has no tokens")
        allowed = limit - count if max_tokens is None else max_tokens
        if count + allowed > limit or (max_tokens is None and allowed < 1):
            wanted = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
            raise ValueError(f"prompt has {count} tokens{wanted}, over the limit of {limit} tokens in all")
        for i in prompt_token_ids:
            if not isinstance(i, int | np.integer) or not 0 <= i < self._vocab_size:
                raise ValueError(f"prompt has token id {i!r}, and the vocabulary ends at {self._vocab_size - 1}")
        return allowed

    def _check(self, params: SamplingParams) -> None:
        """Check parameters against the model and the engine."""
        if params.priority and not self._scheduler.by_priority:
            raise ValueError("priority needs an engine with --scheduling-policy priority")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = next((i for i in getattr(params, name) or () if not 0 <= i < self._vocab_size), None)
            if bad is not None:
                raise ValueError(f"{name} has token id {bad}, and the vocabulary ends at {self._vocab_size - 1}")

    def _check_beams(self, width: int, num_candidates: int, num_prompt: int, max_tokens: int) -> None:
        """Check that a search's beams can all run at once: they wait for each other at every token."""
        tables, most = self._scheduler.tables, self._sizes.max_num_seqs
        if width > most:
            raise ValueError(f"beam_width {width} is over the {most} sequences that run at once: see --max-num-seqs")
        if num_candidates > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width {width} is over the limit of {MAX_LOGPROBS - (num_candidates - width)} for this model"
            )
        own = (tables.blocks_for(max_tokens) + 1) * tables.num_groups
        blocks = min(tables.most(num_prompt) + width * own, width * tables.most(num_prompt + max_tokens))
        if blocks > tables.pool.num_blocks:
            raise ValueError(f"beam_width {width} needs {blocks} blocks of KV cache, and there are "
                             f"{tables.pool.num_blocks}: ask for fewer beams or max_tokens")  # fmt: skip
