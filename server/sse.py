"""Server-sent events: each event is a line ``data: {json}`` and an empty line."""

import asyncio
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from server.errors import ApiError

# A client that takes nothing for so long is taken for gone. Until then all that waits for it is the rest of its own
# output: the engine waits for nobody.
SLOW_READER_SECONDS = 60.0

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % to_json(data)


class ChoiceEvents:
    """Makes events that hold one choice each; what does not change between them is encoded once."""

    def __init__(self, envelope: dict[str, Any], *, usage: bool) -> None:
        self._head = b'data: %b,"choices":[' % to_json(envelope)[:-1]
        # Where usage comes at the end, OpenAI's other chunks say that it is null.
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def choice(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice."""
        return b"%b%b%b" % (self._head, to_json(choice), self._tail)


class EventStream:
    """One request's answer as events. It begins with the first ``send``: errors before that are plain."""

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
        """Write events at once; waits while the client reads too slowly.

        Raises:
            ConnectionError: the client is gone, or has taken nothing for ``SLOW_READER_SECONDS``.
        """
        if not self.started:
            await self.response.prepare(self._request)
        if data := b"".join(events):
            try:
                async with asyncio.timeout(SLOW_READER_SECONDS):
                    await self.response.write(data)
            except TimeoutError:
                if self._request.transport:
                    self._request.transport.abort()
                raise ConnectionResetError("the client reads too slowly") from None

    async def fail(self, error: ApiError) -> None:
        """End with an error event."""
        await self.send([event(error.body())])
        await self.response.write_eof()

    async def done(self) -> None:
        """End as OpenAI's streams do."""
        await self.send([DONE])
        await self.response.write_eof()
