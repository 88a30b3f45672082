"""``POST /v1/completions``: text goes on."""

from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from pagedjax import CompletionOutput, RequestOutput, Tokenizer
from server.body import read_body
from server.gate import check_model
from server.generation import Generation, Usage, answer, new_id
from server.logprobs import TextOffsets, completion_logprobs, likeliest_entries, prompt_logprobs
from server.protocol import CompletionRequest
from server.sse import ChoiceEvents
from server.state import STATE

_WORTH_SENDING = ("text", "finish_reason", "logprobs", "token_ids", "prompt_logprobs", "prompt_token_ids")


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer a completion request, whole or streamed."""
    state = request.app[STATE]
    llm = state.engine()
    body = await read_body(request, CompletionRequest)
    check_model(state, body.model)
    generation = Generation(
        body=body,
        params=body.params(),
        prompts=body.prompts,
        add_special_tokens=body.add_special_tokens,
        id=new_id("cmpl"),
    )
    return await answer(request, generation, CompletionShape(generation, state.model_name, llm.tokenizer))


class CompletionShape:
    """How completions look; see ``generation.Shape``."""

    def __init__(self, generation: Generation, model_name: str, tokenizer: Tokenizer | None) -> None:
        assert isinstance(generation.body, CompletionRequest)
        self._body = generation.body
        self._tokenizer = tokenizer
        self._envelope = {
            "id": generation.id,
            "object": "text_completion",
            "created": generation.created,
            "model": model_name,
        }
        self._events = ChoiceEvents(self._envelope, usage=self._body.include_usage)
        self._choices: dict[int, _Choice] = {}
        self._prompt_logprobs: dict[int, list[Any] | None] = {}

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [choice for index, output in enumerate(outputs) for choice in self._news(index, output)]
        return {**self._envelope, "choices": choices, "usage": usage.as_json()}

    def events(self, index: int, delta: RequestOutput) -> Iterator[bytes]:
        """An event for each choice that has something new to show."""
        for choice in self._news(index, delta):
            # A token may bring no text yet: the rest of its character or of a stop string may be to come.
            if any(choice.get(key) for key in _WORTH_SENDING):
                yield self._events.choice(choice)

    def usage_event(self, usage: Usage) -> dict[str, Any]:
        """The last chunk."""
        return {**self._envelope, "choices": [], "usage": usage.as_json()}

    def _news(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        for news in output.outputs:
            number = index * self._body.n + news.index
            choice = self._choices.get(number)
            if choice is None:
                choice = self._choices[number] = _Choice(number, self._body, self._tokenizer)
                yield choice.first(output, news, self._prompt_logprobs.get(index))
            else:
                yield choice.further(news)


class _Choice:
    """One choice as it grows; it knows how far its text has come."""

    def __init__(self, number: int, body: CompletionRequest, tokenizer: Tokenizer | None) -> None:
        self._number = number
        self._body = body
        self._tokenizer = tokenizer
        self._offsets = TextOffsets(
            tokenizer=tokenizer, skip_special_tokens=body.skip_special_tokens, from_start=body.echo
        )

    def first(self, output: RequestOutput, news: CompletionOutput, prompt_entries: list[Any] | None) -> dict[str, Any]:
        """The choice with its first output, and what was asked for of the prompt."""
        prompt_ids = output.prompt_token_ids
        before = None
        if self._body.echo and self._body.logprobs is not None:
            entries = likeliest_entries(prompt_ids, prompt_entries or (), self._body.logprobs)
            before = completion_logprobs(prompt_ids, entries, self._tokenizer, self._offsets)
        text = self._prompt_text(output) if self._body.echo else ""
        self._offsets.position = len(text)
        choice = self.further(news)
        choice["text"] = text + choice["text"]
        if before is not None:
            choice["logprobs"] = {key: values + choice["logprobs"][key] for key, values in before.items()}
        if self._body.prompt_logprobs is not None and prompt_entries is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt_ids, prompt_entries, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(prompt_ids)
        return choice

    def further(self, news: CompletionOutput) -> dict[str, Any]:
        """The choice with what is new."""
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(news.token_ids, news.logprobs or (), self._tokenizer, self._offsets)
        choice: dict[str, Any] = {
            "index": self._number,
            "text": news.text,
            "logprobs": logprobs,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(news.token_ids)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        skip = self._body.skip_special_tokens
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip) if self._tokenizer else ""
