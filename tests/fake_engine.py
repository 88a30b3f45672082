"""An engine that answers from a script, with ``AsyncLLM``'s interface: the server's tests need no model."""

import asyncio
import codecs
import itertools
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from pagedjax import (
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    QueueFull,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from pagedjax.metrics import Metrics
from pagedjax.tokenizer import Tokenizer

SCRIPT = " the caf\u00e9 \u2615 is open \U0001f600 all day."
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user speaks first') }}{% endif %}"
    "{% if shout is defined %}!{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS, EOS = "<s>", "</s>"


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A token per byte, and two special ones; it puts ``<s>`` before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS])
    bos = (BOS, backend.token_to_id(BOS))
    backend.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[bos])
    settings = {"bos_token": BOS, "eos_token": EOS}
    return Tokenizer(backend, settings, {"default": template} if template else {})


@dataclass
class FakeLLM:
    """Each sequence says ``script``, a token a step, until ``max_tokens`` or the script's end.

    A prompt that holds "boom" fails in the engine after two tokens, one with "bug" raises what it should not.
    A beam search's hypothesis number i is the script without its first i characters, all of them at once.
    """

    script: str = SCRIPT
    tokenizer: Tokenizer | None = field(default_factory=byte_tokenizer)
    model_name: str = "tiny"
    max_model_len: int = 256
    vocab_size: int = 258
    step_seconds: float = 0.0
    max_queue: int = 16
    healthy: bool = True
    hangs: bool = False
    was_shut_down: bool = False
    running: set[str] = field(default_factory=set)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    by_priority: bool = False
    most_beams: int = 16
    seen: list[tuple[list[int], Any]] = field(default_factory=list)
    salts: list[str | None] = field(default_factory=list)
    snapshot: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics_registry = Metrics(self.model_name)

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def is_healthy(self, hang_timeout: float) -> bool:
        return self.healthy and hang_timeout > 0

    async def blocks(self) -> dict[str, Any]:
        return self.snapshot

    async def shutdown(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 (AsyncLLM's)
        assert timeout is not None, "the server never waits for ever"
        self.was_shut_down = True
        return not self.hangs

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        delta: bool = False,
        add_special_tokens: bool = True,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = self._prompt_ids(prompt, add_special_tokens)
        room = self.max_model_len - len(ids)
        if room < (params.max_tokens or 0) or room < 1:
            raise ValueError(
                f"prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}, "
                f"over the limit of {self.max_model_len}"
            )
        self._check(params)
        if len(self.running) >= self.max_queue:
            raise QueueFull("the queue is full")
        assert request_id is not None
        assert request_id not in self.running
        self.running.add(request_id)
        self.begun.set()
        self.seen.append((ids, params))
        self.salts.append(cache_salt)
        try:
            about = {"request_id": request_id, "prompt": prompt if isinstance(prompt, str) else None}
            if isinstance(params, BeamSearchParams):
                await asyncio.sleep(self.step_seconds)
                yield self._hypotheses(about, ids, params)
                return
            async for output in self._steps(about, ids, params, room, delta):
                yield output
        finally:
            self.running.discard(request_id)

    def _check(self, params: SamplingParams | BeamSearchParams) -> None:
        if isinstance(params, BeamSearchParams):
            if params.beam_width > self.most_beams:
                raise ValueError(f"beam_width {params.beam_width} is over the {self.most_beams} that run at once")
        elif params.priority and not self.by_priority:
            raise ValueError("priority needs an engine with --scheduling-policy priority")

    def _hypotheses(self, about: dict[str, Any], ids: list[int], params: BeamSearchParams) -> RequestOutput:
        outputs = []
        for index in range(params.beam_width):
            assert self.tokenizer is not None
            token_ids = self.tokenizer.encode(self.script[index:], add_special_tokens=False)
            cut = len(token_ids) if params.max_tokens is None else params.max_tokens
            output = CompletionOutput(index=index, token_ids=token_ids[:cut], cumulative_logprob=-1.0 - index)
            output.text = self.tokenizer.decode(output.token_ids)
            output.finish_reason = "length" if cut < len(token_ids) else "stop"
            outputs.append(output)
        return RequestOutput(**about, prompt_token_ids=ids, outputs=outputs, finished=True, num_cached_tokens=3)

    def _prompt_ids(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        if not isinstance(prompt, str):
            if bad := [i for i in prompt if i >= self.vocab_size]:
                raise ValueError(f"prompt holds token id {bad[0]}, but the vocabulary has {self.vocab_size}")
            return prompt
        if self.tokenizer is None:
            raise ValueError("prompt is text, but the model has no tokenizer")
        return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    async def _steps(
        self, about: dict[str, Any], ids: list[int], params: SamplingParams, room: int, delta: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        words = self.tokenizer.decode(ids) if self.tokenizer else ""
        script = self.tokenizer.encode(self.script, add_special_tokens=False) if self.tokenizer else list(range(20))
        limit = room if params.max_tokens is None else params.max_tokens
        sequences = [_FakeSequence(self, i, script[:limit], params) for i in range(params.n)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self.logprobs(i, params.prompt_logprobs) for i in ids[1:])]
        for step in itertools.count():
            await asyncio.sleep(self.step_seconds)
            if "bug" in words:
                raise RuntimeError("a fault of our own: secret")
            if "boom" in words and step == 2:
                raise RequestError("the device broke")
            news = [s.step() for s in sequences if not s.finished]
            outputs = news if delta else [s.whole for s in sequences]
            finished = all(s.finished for s in sequences)
            output = RequestOutput(
                **about,
                prompt_token_ids=ids,
                outputs=outputs,
                finished=finished,
                num_cached_tokens=3,
                prompt_logprobs=prompt_logprobs if step == 0 or not delta else None,
            )
            yield output
            if finished:
                return

    def logprobs(self, token_id: int, top: int) -> dict[int, Logprob]:
        """The token in second place, and as many as asked for from the top; the rest follow by number."""
        ranks = {1: (token_id + 1) % 256, 2: token_id} | {r: (token_id + r) % 256 for r in range(3, top + 1)}
        chosen = {rank: i for rank, i in ranks.items() if rank <= top or i == token_id}
        text = self.tokenizer.token_text if self.tokenizer else lambda _: None
        return {i: Logprob(-math.log(1 + rank), rank, text(i)) for rank, i in chosen.items()}


class _FakeSequence:
    def __init__(self, llm: FakeLLM, index: int, script: list[int], params: SamplingParams) -> None:
        self._llm = llm
        self._script = script
        self._params = params
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.whole = CompletionOutput(index=index, logprobs=None if params.logprobs is None else [])

    @property
    def finished(self) -> bool:
        return self.whole.finish_reason is not None

    def step(self) -> CompletionOutput:
        whole, tokenizer = self.whole, self._llm.tokenizer
        new = CompletionOutput(index=whole.index, logprobs=None if self._params.logprobs is None else [])
        if self._script:
            token_id = self._script[len(whole.token_ids)]
            new.token_ids = [token_id]
            new.text = self._decoder.decode(tokenizer.token_bytes(token_id)) if tokenizer else ""
            if new.logprobs is not None and self._params.logprobs is not None:
                new.logprobs.append(self._llm.logprobs(token_id, self._params.logprobs))
        whole.token_ids = whole.token_ids + new.token_ids
        if whole.logprobs is not None and new.logprobs is not None:
            whole.logprobs = whole.logprobs + new.logprobs
        if new.text in self._params.stop:  # stop strings of one character are enough here
            new.text, new.finish_reason, new.stop_reason = "", "stop", new.text
        elif len(whole.token_ids) == len(self._script):
            new.finish_reason = "length" if len(self._script) == self._params.max_tokens else "stop"
            new.text += self._decoder.decode(b"", final=True)
        whole.text += new.text
        whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
        return new
