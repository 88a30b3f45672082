"""One streamed request to an OpenAI-compatible server, and what it waited for."""

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic import TypeAdapter, ValidationError

Prompt = str | list[int]

_MESSAGE = 200  # characters of an error that are shown
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request to be made.

    Attributes:
        prompt: text or token ids.
        prompt_tokens: tokens that it is meant to have; a server's usage says how many there were.
        output_tokens: the most that the server may generate.
    """

    prompt: Prompt
    prompt_tokens: int
    output_tokens: int


@dataclass(kw_only=True)
class Answer:
    """What came back. Moments are in seconds of ``time.perf_counter``.

    Attributes:
        sent: when the request went out.
        chunks: when each piece of output arrived.
        ended: when the last piece arrived, or the chunk that says why the output ends; or when it failed.
        prompt_tokens, output_tokens: by the server's usage or, where it gives none, as sent and as many as chunks.
        has_usage: which of the two it was.
        failure: what kind of failure it was, in a few words; None for an answer that is whole.
        message: more about the failure, one line.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    failure: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None where none came."""
        return self.chunks[0] - self.sent if self.chunks else None

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first; None where there is none."""
        if not self.chunks or self.output_tokens < 2:
            return None
        return (self.ended - self.chunks[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go, and what stands in each of them.

    Attributes:
        url: of the server, without ``/v1``.
        model: as the server calls it.
        chat: ask ``/v1/chat/completions``, the prompt as a user's message; else ``/v1/completions``.
        extra: fields to put into each body; None takes a field out.
    """

    url: str
    model: str
    chat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The endpoint's address."""
        return self.url + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self, call: Call) -> bytes:
        """The request's JSON: greedy, streamed, with the usage at the end. All of its fields are OpenAI's."""
        fields: dict[str, Any] = {"model": self.model}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": call.prompt}]
        else:
            fields["prompt"] = call.prompt
        fields |= {"max_tokens": call.output_tokens, "temperature": 0, "stream": True}
        fields |= {"stream_options": {"include_usage": True}, **self.extra}
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint, call: Call) -> Answer:
    """Make a request and read its answer to the end. Whatever goes wrong with it is the answer's ``failure``."""
    body = endpoint.body(call)
    answer = Answer(sent=time.perf_counter())
    stream = _Stream(answer)
    try:
        # A redirect would turn the POST into a GET, and may carry the key to another host.
        async with session.post(endpoint.path, data=body, allow_redirects=False) as response:
            await _check(response)
            async for event in _events(response.content):
                stream.take(event, time.perf_counter())
        stream.end()
    except _FailedError as failed:
        answer.failure, answer.message = failed.kind, _one_line(failed.message)
    except TimeoutError:  # aiohttp's own are of this kind too
        answer.failure = "timeout"
    except aiohttp.ClientConnectorError as error:
        answer.failure, answer.message = "no connection", _one_line(str(error))
    except aiohttp.ClientPayloadError as error:
        answer.failure, answer.message = "cut off", _one_line(str(error))
    except (aiohttp.ClientError, OSError) as error:
        answer.failure, answer.message = "connection lost", _one_line(f"{type(error).__name__}: {error}")
    if answer.failure is not None:
        answer.ended = time.perf_counter()
    if not answer.has_usage:
        answer.prompt_tokens, answer.output_tokens = call.prompt_tokens, len(answer.chunks)
    return answer


class _FailedError(Exception):
    """A request's failure: its kind, in a few words, and what the server says."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.message = message


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise _FailedError(f"HTTP {response.status}", _error_message(await response.read()))
    if response.content_type != "text/event-stream":
        raise _FailedError("not a stream", f"the answer is {response.content_type}")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, of which OpenAI's have one line each; comments and other fields are left out."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


# What is read of a chunk; servers put more into it, and some leave fields out or make them null.


@dataclass
class _Delta:
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


@dataclass
class _Choice:
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def brings_output(self) -> bool:
        """Not so the chunk with the role alone, nor one that only says why the output ends."""
        found: Any = self.text or self.token_ids
        if self.delta is not None:
            delta = self.delta
            found = found or delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
        return bool(found)


@dataclass
class _Usage:
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass
class _Chunk:
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_CHUNK = TypeAdapter(_Chunk)


class _Stream:
    """Writes what a stream's events say into an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._whole = False

    def take(self, event: bytes, now: float) -> None:
        """One event, which arrived at ``now``."""
        if event == b"[DONE]":
            self._whole = True
            self._answer.ended = self._answer.ended or now
            return
        try:
            chunk = _CHUNK.validate_json(event)
        except ValidationError as error:
            raise _FailedError("malformed event", str(error)) from None
        if chunk.error:
            raise _FailedError("error in the stream", _error_message(event))
        for choice in chunk.choices or ():
            self._answer.ended = now
            if choice.brings_output:
                self._answer.chunks.append(now)
            self._whole = self._whole or choice.finish_reason is not None
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self._answer.has_usage = True
            self._answer.output_tokens = chunk.usage.completion_tokens
            self._answer.prompt_tokens = chunk.usage.prompt_tokens or 0

    def end(self) -> None:
        """The stream is over. Some servers send no ``[DONE]``, but all say why the output ends."""
        if not self._whole:
            raise _FailedError("cut off", "the stream ended before the output did")
        if self._answer.output_tokens and not self._answer.chunks:
            # Tokens without a text, such as special ones, or without a tokenizer: they are there when the end is.
            self._answer.chunks.append(self._answer.ended)


def _error_message(body: bytes) -> str:
    """What an error's body says: OpenAI's ``error.message``, or whatever stands there."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def _one_line(text: str) -> str:
    return _CONTROL.sub(" ", text).strip()[:_MESSAGE]
