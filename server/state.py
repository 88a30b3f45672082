"""Where the server is in its life, and the requests under way."""

import asyncio
import enum
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from pagedjax import AsyncLLM
from server.config import ServerConfig
from server.errors import ApiError, unavailable


class Phase(enum.Enum):
    """Loading the model, serving, or ending."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class ServerState:
    """The engine once it is loaded, and the generations that run on it."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.phase = Phase.LOADING
        self.llm: AsyncLLM | None = None
        self.ready_time = 0  # seconds since 1970
        self.hangs = False  # the engine did not end when it was told to
        self._end = 0.0  # when a server that is shutting down will be gone, by the loop's clock
        self._scopes: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model_name(self) -> str:
        """What clients call the model; empty while it is not known."""
        return self.config.served_model_name or (self.llm.model_name if self.llm else "")

    def ready(self, llm: AsyncLLM) -> None:
        """The engine is loaded; requests are taken from now on (unless the server is already ending)."""
        self.llm = llm
        self.ready_time = int(time.time())
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def engine(self) -> AsyncLLM:
        """The engine.

        Raises:
            ApiError: 503, it is loading or takes no more requests.
        """
        if self.phase is Phase.DRAINING:
            left = self._end - asyncio.get_running_loop().time()
            raise unavailable("the server is shutting down and takes no more requests", left)
        return self.loaded()

    def loaded(self) -> AsyncLLM:
        """The engine, for who only looks at it: also while the server is shutting down.

        Raises:
            ApiError: 503, it is loading.
        """
        if self.llm is None:
            raise unavailable("the model is loading: try again in a moment")
        return self.llm

    @asynccontextmanager
    async def generation(self, timeout: float | None) -> AsyncIterator[AsyncLLM]:  # noqa: ASYNC109 (a limit, not a wait)
        """Run a generation inside: it is waited for at shutdown, and ended when its time is up.

        Args:
            timeout: seconds that the client gives it; the server's ``request_timeout`` where that is less.

        Raises:
            ApiError: 503 if no requests are taken or the server ended first, 408 when its time is up.
        """
        llm = self.engine()
        limit = min((t for t in (timeout, self.config.request_timeout) if t is not None), default=None)
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                self._scopes.add(scope)
                self._idle.clear()
                try:
                    yield llm
                finally:
                    self._scopes.discard(scope)
                    if not self._scopes:
                        self._idle.set()
        except TimeoutError:
            if not scope.expired():
                raise
            if self.phase is Phase.DRAINING:
                raise unavailable("the server shut down before the request was done") from None
            message = f"the request took longer than {limit:g} s"
            raise ApiError(408, message, code="request_timeout") from None

    async def drain(self) -> None:
        """Take no more requests; return when the running ones are done or, in the end, told to end."""
        self.phase = Phase.DRAINING
        self._end = asyncio.get_running_loop().time() + self.config.shutdown_timeout
        try:
            async with asyncio.timeout(self.config.shutdown_timeout):
                await self._idle.wait()
        except TimeoutError:
            for scope in self._scopes:
                if not scope.expired():  # its own time may be up, and its end under way
                    scope.reschedule(asyncio.get_running_loop().time())


STATE: web.AppKey[ServerState] = web.AppKey("STATE", ServerState)
