"""``LLM``: the engine for scripts and notebooks, where the caller waits for the results."""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any

from tqdm import tqdm

from pagedjax.config import BeamSearchParams, EngineConfig, SamplingParams
from pagedjax.engine import Engine
from pagedjax.loading import load_engine
from pagedjax.request import OutputCollector, RequestOutput
from pagedjax.tokenizer import Tokenizer

Prompt = str | ListLike[int]


class LLM:
    """A loaded model.

    Args:
        model: ``demo``, a folder, a ``.gguf`` file or a hub id.
        flags: every engine flag as a keyword, with the meaning it has on the command line (see ``EngineConfig``).

    Raises:
        UserError: the model can't be loaded or does not fit.
    """

    def __init__(self, model: str, **flags: Any):
        self.engine: Engine = load_engine(EngineConfig(model=model, **flags))
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where it has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
            prompts: text, a list of texts, token ids, or a list of lists of token ids.
            params: for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: a prompt or parameter can't be served; nothing has run then.
        """
        listed = _as_list(prompts)
        each = _params_for(params, len(listed))
        token_ids = [self._encode(prompt) for prompt in listed]
        return self._run(
            [
                (text if isinstance(text, str) else None, ids, p)
                for text, ids, p in zip(listed, token_ids, each, strict=True)
            ],
            use_tqdm,
        )

    def chat(
        self,
        messages: ListLike[Mapping[str, Any]] | ListLike[ListLike[Mapping[str, Any]]],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        Raises:
            UserError: the model has no chat template.
            ValueError: the template refuses the messages.
        """
        if self.tokenizer is None:
            raise ValueError("messages need a tokenizer with a chat template, and this model has no tokenizer")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        texts = [self.tokenizer.apply_chat_template(list(c), **template_options) for c in conversations]
        each = _params_for(params, len(texts))
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._run(list(zip(texts, encoded, each, strict=True)), use_tqdm)

    def beam_search(
        self, prompts: Prompt | ListLike[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Beam search over each prompt, with the results of Hugging Face's ``generate(num_beams=)``.

        Returns:
            One output per prompt, in their order; its ``outputs`` are the hypotheses, best first.

        Raises:
            ValueError: a prompt or parameter can't be served; nothing has run then.
        """
        listed = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        encoded = [self._encode(prompt) for prompt in listed]
        return self._run([(text, ids, params) for text, ids in zip(texts, encoded, strict=True)], use_tqdm)

    def score(self, token_ids: ListLike[int]) -> list[float]:
        """Log-probabilities of a text's tokens, each given all before it: one fewer than tokens, the first has none.

        Raises:
            ValueError: there are no tokens, or more than the model takes.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [output] = self._run([(None, list(token_ids), params)], use_tqdm=False)
        assert output.prompt_logprobs is not None, "they were asked for"
        scored = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [entries[token_id].logprob for token_id, entries in scored if entries is not None]

    def metrics(self) -> dict[str, float]:
        """The engine's numbers, by the names of ``/metrics`` without their prefix."""
        return self.engine.metrics.as_dict()

    def blocks(self) -> dict[str, Any]:
        """Every block of the pool and every request as they are now: what ``GET /debug/blocks`` shows."""
        return self.engine.snapshot()

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("prompt is text, and this model has no tokenizer: give token ids")
        return self.tokenizer.encode(prompt)

    def _run(
        self, prompts: ListLike[tuple[str | None, list[int], SamplingParams | BeamSearchParams]], use_tqdm: bool
    ) -> list[RequestOutput]:
        ids = [f"llm-{next(self._ids)}" for _ in prompts]
        collectors = {request_id: OutputCollector() for request_id in ids}
        done: dict[str, RequestOutput] = {}
        try:
            for request_id, (text, token_ids, params) in zip(ids, prompts, strict=True):
                self.engine.add_request(request_id, token_ids, params, text)
            with tqdm(total=len(ids), desc="generating", unit="request", disable=not use_tqdm) as bar:
                while len(done) < len(ids):
                    for delta in self.engine.step():
                        collectors[delta.request_id].add(delta)
                        if delta.finished:
                            done[delta.request_id] = collectors[delta.request_id].snapshot()
                            bar.update()
        finally:  # an error, or the user's Ctrl-C: nothing stays behind
            for request_id in ids:
                self.engine.abort(request_id)
        return [done[request_id] for request_id in ids]


def _as_list(prompts: Prompt | ListLike[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(p, int) for p in listed) else listed


def _params_for(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params)
    if len(listed) != count:
        raise ValueError(f"params has {len(listed)} entries for {count} prompts")
    return listed
