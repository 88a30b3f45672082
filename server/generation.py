"""Run a request's prompts on the engine and answer with the outputs, whole or as a stream."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web
from pydantic_core import to_json

from pagedjax import AsyncLLM, BeamSearchParams, OutputCollector, RequestOutput, SamplingParams
from server.errors import REQUEST_ID, as_api_error
from server.protocol import SamplingRequest
from server.sse import EventStream, event
from server.state import STATE


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Count what is new in an output of prompt ``index``."""
        self.prompt_tokens[index] = max(self.prompt_tokens.get(index, 0), len(output.prompt_token_ids))
        self.cached_tokens[index] = max(self.cached_tokens.get(index, 0), output.num_cached_tokens)
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    def as_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt_tokens = sum(self.prompt_tokens.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What to run: prompts that share their parameters. ``id`` is the answer's, such as ``cmpl-...``."""

    body: SamplingRequest
    params: SamplingParams | BeamSearchParams
    prompts: Sequence[str | list[int]]
    add_special_tokens: bool
    id: str
    created: int = field(default_factory=lambda: int(time.time()))


class Shape(Protocol):
    """How an endpoint's answers look. A choice's index is its prompt's times n plus its own."""

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed, from each prompt's whole output."""

    def events(self, index: int, delta: RequestOutput) -> Iterable[bytes]:
        """Events for what is new in the output of prompt ``index``."""

    def usage_event(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that was asked for its usage."""


def new_id(prefix: str) -> str:
    """An id that no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def answer(request: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
    """Run ``generation`` and answer in ``shape``. A client that hangs up cancels this, and so the generation.

    Raises:
        ApiError: nothing could be sent yet; later errors become the stream's last event.
    """
    if generation.body.stream:
        return await _stream(request, generation, shape)
    state = request.app[STATE]
    collectors = [OutputCollector() for _ in generation.prompts]
    usage = Usage()
    async with state.generation(generation.body.timeout) as llm, aclosing(_deltas(llm, generation)) as deltas:
        async for index, delta in deltas:
            usage.add(index, delta)
            collectors[index].add(delta)
    body = to_json(shape.whole([collector.snapshot() for collector in collectors], usage))
    return web.Response(body=body, content_type="application/json")


async def _stream(request: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
    state = request.app[STATE]
    stream = EventStream(request)
    usage = Usage()
    try:
        async with state.generation(generation.body.timeout) as llm, aclosing(_deltas(llm, generation)) as deltas:
            async for index, delta in deltas:
                usage.add(index, delta)
                await stream.send(shape.events(index, delta))
            if generation.body.include_usage:
                await stream.send([event(shape.usage_event(usage))])
            await stream.done()
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:
        if not stream.started:
            raise
        await stream.fail(as_api_error(error, request[REQUEST_ID]))
    return stream.response


async def _deltas(llm: AsyncLLM, generation: Generation) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What is new of all prompts as it comes, each with its prompt's index."""
    began = False
    try:
        streams = [
            llm.generate(
                prompt,
                generation.params,
                request_id=f"{generation.id}-{index}",
                delta=True,
                add_special_tokens=generation.add_special_tokens,
                cache_salt=generation.body.cache_salt,
            )
            for index, prompt in enumerate(generation.prompts)
        ]
        async with aclosing(_merged(streams)) as items:
            async for index, delta in items:
                began = True
                if isinstance(generation.params, BeamSearchParams):
                    # All hypotheses come, best first: of these the request wants n.
                    delta = dataclasses.replace(delta, outputs=delta.outputs[: generation.body.n])
                yield index, delta
    except ValueError as error:
        # Before the first output the engine's ValueErrors are about the request; later ones are faults.
        if not began and (refusal := generation.body.blame(error)):
            raise refusal from None
        raise


async def _merged[T](streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's index; the first error ends them all."""
    if len(streams) == 1:  # no task and no queue between a lone stream and its reader
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((index, item))
        except Exception as error:  # noqa: BLE001 (the reader raises it)
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
