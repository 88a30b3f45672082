"""``POST /v1/chat/completions``: a conversation goes on."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pagedjax import (
    AsyncLLM,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    Tokenizer,
    UserError,
)
from server.body import read_body
from server.errors import bad_request
from server.gate import check_model
from server.generation import Generation, Usage, answer, new_id
from server.logprobs import chat_logprobs, prompt_logprobs
from server.protocol import ChatRequest, TemplateFields
from server.reasoning import ReasoningReader, begins_inside
from server.sse import ChoiceEvents
from server.state import STATE, ServerState
from server.tool_calls import FORCED, FORMATS, Format, ToolCall, ToolCallReader, forced_schema, format_of
from server.tools import Tool


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat request, whole or streamed."""
    state = request.app[STATE]
    llm = state.engine()
    body = await read_body(request, ChatRequest)
    check_model(state, body.model)
    params = body.params()
    format_ = _tool_format(state, llm, body)
    if isinstance(params, SamplingParams) and format_ is not None:
        params = _for_tools(params, llm, body, format_)
    prompt = await chat_prompt(llm, body, body.offered_tools)
    generation = Generation(
        body=body,
        params=params,
        prompts=[prompt],
        add_special_tokens=body.add_special_tokens,
        id=new_id("chatcmpl"),
    )
    thinks = begins_inside(prompt) if state.config.reasoning_parser == "think" else None
    return await answer(request, generation, ChatShape(generation, state.model_name, llm.tokenizer, format_, thinks))


def _tool_format(state: ServerState, llm: AsyncLLM, body: ChatRequest) -> Format | None:
    """How the model's calls of functions are to be read; None where it is told of none."""
    if not body.offered_tools:
        return None
    template = (llm.tokenizer and llm.tokenizer.chat_template) or ""
    if "tools" not in template:
        raise bad_request("tools are not known to this model's chat template: leave them out", "tools")
    if body.forced_tools:
        return FORCED
    asked = state.config.tool_call_parser
    name = format_of(template) if asked == "auto" else asked
    if name is None:
        message = "tools are known to this model, and not how it writes its calls: start the server with "
        raise bad_request(f"{message}--tool-call-parser, or choose a tool_choice other than auto", "tools")
    return FORMATS[name]


def _for_tools(params: SamplingParams, llm: AsyncLLM, body: ChatRequest, format_: Format) -> SamplingParams:
    """The parameters with which calls come as they can be read."""
    if body.forced_tools:
        tools = [(tool.function.name, tool.function.parameters) for tool in body.forced_tools]
        schema = forced_schema(tools, several=body.parallel_tool_calls)
        try:
            return dataclasses.replace(params, structured_outputs=StructuredOutputsParams(json=schema))
        except ValueError as error:
            raise bad_request(str(error).replace("structured_outputs.json", "tools", 1), "tools") from None
    assert llm.tokenizer is not None, "there is a chat template"
    is_special = any(mark in llm.tokenizer.special_tokens for mark in format_.marks)
    return dataclasses.replace(params, skip_special_tokens=False) if is_special else params


async def chat_prompt(llm: AsyncLLM, body: TemplateFields, tools: Sequence[Tool] = ()) -> str:
    """The messages as one text, by the model's chat template, which tells of ``tools`` too.

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
            tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
            **body.chat_template_kwargs,
        )
    except (UserError, ValueError) as error:
        raise bad_request(str(error), "messages") from None


@dataclass
class _Said:
    """A choice as it grows: what reads it, and how many calls there were."""

    reasoning: ReasoningReader | None
    tools: ToolCallReader | None
    calls: int = 0


class ChatShape:
    """How chat completions look; see ``generation.Shape``.

    ``tools`` is how calls are written, where there are tools; ``thinks`` whether the prompt has begun the model's
    reasoning, None where it is not told from the answer.
    """

    def __init__(
        self,
        generation: Generation,
        model_name: str,
        tokenizer: Tokenizer | None,
        tools: Format | None = None,
        thinks: bool | None = None,
    ) -> None:
        assert isinstance(generation.body, ChatRequest)
        self._body = generation.body
        self._tokenizer = tokenizer
        self._about = {"id": generation.id, "created": generation.created, "model": model_name}
        self._chunk = {**self._about, "object": "chat.completion.chunk"}
        self._events = ChoiceEvents(self._chunk, usage=self._body.include_usage)
        self._started = False
        self._tools, self._thinks = tools, thinks
        self._said: dict[int, _Said] = {}

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        [output] = outputs
        answer = {**self._about, "object": "chat.completion", "usage": usage.as_json()}
        answer["choices"] = [self._choice(news, "message", self._message(news)) for news in output.outputs]
        return answer | self._of_the_prompt(output)

    def events(self, index: int, delta: RequestOutput) -> Iterator[bytes]:
        """First an event with the role for each choice, then one for each that has something new to show."""
        if not self._started:
            self._started = True
            yield from self._role_events(delta)
        for news in delta.outputs:
            reasoning, text, calls = self._take(news)
            parts = {"reasoning_content": reasoning, "content": text, "tool_calls": calls}
            delta_of = {name: part for name, part in parts.items() if part}
            choice = self._choice(news, "delta", delta_of)
            if delta_of or news.finish_reason or choice["logprobs"] or self._body.return_token_ids:
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

    def _message(self, news: CompletionOutput) -> dict[str, Any]:
        reasoning, text, calls = self._take(news)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._thinks is not None and self._body.include_reasoning:
            message["reasoning_content"] = reasoning or None
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return message

    def _take(self, news: CompletionOutput) -> tuple[str, str, list[dict[str, Any]]]:
        """What is new, as reasoning, text and calls."""
        if self._tools is None and self._thinks is None:
            return "", news.text, []
        if news.index not in self._said:
            thinking = None if self._thinks is None else ReasoningReader(inside=self._thinks)
            self._said[news.index] = _Said(thinking, ToolCallReader(self._tools) if self._tools else None)
        said = self._said[news.index]
        reasoning, text = "", news.text
        if said.reasoning:
            reasoning, text = said.reasoning.feed(news.text)
            if news.finish_reason:
                last = said.reasoning.finish()
                reasoning, text = reasoning + last[0], text + last[1]
        calls: list[dict[str, Any]] = []
        if said.tools:
            parts = said.tools.feed(text) + (said.tools.finish() if news.finish_reason else [])
            text = self._without_special("".join(part for part in parts if isinstance(part, str)))
            for part in parts:
                if isinstance(part, ToolCall):
                    function = {"name": part.name, "arguments": part.arguments}
                    calls.append({"index": said.calls, "id": new_id("call"), "type": "function", "function": function})
                    said.calls += 1
        return reasoning if self._body.include_reasoning else "", text, calls

    def _without_special(self, text: str) -> str:
        """The text as it is without special tokens, which the reader of calls had to see."""
        if self._tokenizer and self._body.skip_special_tokens:
            for special in self._tokenizer.special_tokens:
                text = text.replace(special, "")
        return text

    def _finish_reason(self, news: CompletionOutput) -> str | None:
        has_called = news.index in self._said and self._said[news.index].calls
        return "tool_calls" if has_called and news.finish_reason == "stop" else news.finish_reason

    def _choice(self, news: CompletionOutput, name: str, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            top = self._body.top_logprobs or 0
            logprobs = chat_logprobs(news.token_ids, news.logprobs or (), top, self._tokenizer)
        choice = {
            "index": news.index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(news),
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
