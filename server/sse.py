"""Server-sent events: each event is a line ``data: {json}`` and an empty line."""

import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from server.errors import ApiError

DONE = b"data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return f"data: {_encode(data)}\n\n".encode()


class ChoiceEvents:
    """Makes events that hold one choice each; what does not change between them is encoded once."""

    def __init__(self, envelope: dict[str, Any], *, usage: bool) -> None:
        self._head = f'data: {_encode(envelope)[:-1]},"choices":['
        # Where usage comes at the end, OpenAI's other chunks say that it is null.
        self._tail = '],"usage":null}\n\n' if usage else "]}\n\n"

    def choice(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice."""
        return f"{self._head}{_encode(choice)}{self._tail}".encode()


class EventStream:
    """The answer to one request, as events. It begins with the first ``send``, so that errors before it are plain."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self.response.headers["X-Accel-Buffering"] = "no"  # asks nginx to pass events on at once

    @property
    def started(self) -> bool:
        """Whether the status line has gone out."""
        return self.response.prepared

    async def send(self, events: Iterable[bytes]) -> None:
        """Write events at once; waits while the client reads too slowly."""
        if not self.started:
            await self.response.prepare(self._request)
        if data := b"".join(events):
            await self.response.write(data)

    async def fail(self, error: ApiError) -> None:
        """End with an error event."""
        await self.send([event(error.body())])
        await self.response.write_eof()

    async def done(self) -> None:
        """End as OpenAI's streams do."""
        await self.send([DONE])
        await self.response.write_eof()
