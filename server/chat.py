"""``POST /v1/chat/completions``: a conversation goes on."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from pagedjax import AsyncLLM, CompletionOutput, RequestOutput, Tokenizer, UserError
from server.body import read_body
from server.errors import bad_request
from server.gate import check_model
from server.generation import Generation, Usage, answer, new_id
from server.logprobs import chat_logprobs, prompt_logprobs
from server.protocol import ChatRequest, TemplateFields
from server.sse import ChoiceEvents
from server.state import STATE


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat request, whole or streamed."""
    state = request.app[STATE]
    llm = state.engine()
    body = await read_body(request, ChatRequest)
    check_model(state, body.model)
    params = body.params()
    generation = Generation(
        body=body,
        params=params,
        prompts=[await chat_prompt(llm, body)],
        add_special_tokens=body.add_special_tokens,
        id=new_id("chatcmpl"),
    )
    return await answer(request, generation, ChatShape(generation, state.model_name, llm.tokenizer))


async def chat_prompt(llm: AsyncLLM, body: TemplateFields) -> str:
    """The messages as one text, by the model's chat template.

    Raises:
        ApiError: 400, the model has no template, or the template refuses the messages.
    """
    if llm.tokenizer is None:
        raise bad_request("this model has no tokenizer, and so no chat: send token ids to /v1/completions", "messages")
    try:
        # In a thread: long conversations must not hold up everybody's streams.
        return await asyncio.to_thread(
            llm.tokenizer.apply_chat_template,
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **body.chat_template_kwargs,
        )
    except (UserError, ValueError) as error:
        raise bad_request(str(error), "messages") from None


class ChatShape:
    """How chat completions look; see ``generation.Shape``."""

    def __init__(self, generation: Generation, model_name: str, tokenizer: Tokenizer | None) -> None:
        assert isinstance(generation.body, ChatRequest)
        self._body = generation.body
        self._tokenizer = tokenizer
        self._about = {"id": generation.id, "created": generation.created, "model": model_name}
        self._chunk = {**self._about, "object": "chat.completion.chunk"}
        self._events = ChoiceEvents(self._chunk, usage=self._body.include_usage)
        self._started = False

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        [output] = outputs
        answer = {**self._about, "object": "chat.completion", "usage": usage.as_json()}
        answer["choices"] = [
            self._choice(news, "message", {"role": "assistant", "content": news.text, "refusal": None})
            for news in output.outputs
        ]
        return answer | self._of_the_prompt(output)

    def events(self, index: int, delta: RequestOutput) -> Iterator[bytes]:
        """First an event with the role for each choice, then one for each that has something new to show."""
        if not self._started:
            self._started = True
            yield from self._role_events(delta)
        for news in delta.outputs:
            choice = self._choice(news, "delta", {"content": news.text} if news.text else {})
            if news.text or news.finish_reason or choice["logprobs"] or self._body.return_token_ids:
                yield self._events.choice(choice)

    def usage_event(self, usage: Usage) -> dict[str, Any]:
        """The last chunk."""
        return {**self._chunk, "choices": [], "usage": usage.as_json()}

    def _role_events(self, output: RequestOutput) -> Iterator[bytes]:
        about_prompt = self._of_the_prompt(output)
        events = ChoiceEvents({**self._chunk, **about_prompt}, usage=self._body.include_usage)
        for index in range(self._body.n):
            delta = {"role": "assistant", "content": ""}
            yield events.choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _choice(self, news: CompletionOutput, name: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            top = self._body.top_logprobs or 0
            logprobs = chat_logprobs(news.token_ids, news.logprobs or (), top, self._tokenizer)
        choice = {
            "index": news.index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": news.finish_reason,
        }
        choice["stop_reason"] = news.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = list(news.token_ids)
        return choice

    def _of_the_prompt(self, output: RequestOutput) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            entries, top = output.prompt_logprobs, self._body.prompt_logprobs
            about["prompt_logprobs"] = prompt_logprobs(output.prompt_token_ids, entries, top)
        if self._body.return_token_ids:
            about["prompt_token_ids"] = list(output.prompt_token_ids)
        return about
