import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from fake_engine import FakeLLM

from server import ServerConfig, app_runner, create_app


@dataclass
class Served:
    """A server on a real port, and a session that talks to it."""

    url: str
    app: web.Application
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.session.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.session.get(self.url + path, **options) as answer:
            return answer.status, await answer.json()


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
async def served_with(llm: FakeLLM) -> AsyncIterator[Serve]:
    """Starts servers; settings are those of ServerConfig, ``engine`` takes the place of the fake one."""
    runners: list[web.AppRunner] = []
    sessions: list[aiohttp.ClientSession] = []

    async def start(engine: Any = llm, **settings: Any) -> Served:
        app = create_app(engine, ServerConfig(**settings))
        runner = app_runner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        sessions.append(aiohttp.ClientSession())
        return Served(f"http://{host}:{port}", app, sessions[-1])

    yield start
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def served(served_with: Serve) -> Served:
    return await served_with()


@pytest.fixture
def url(llm: FakeLLM) -> Iterator[str]:
    """A server in a thread of its own, for clients that block."""
    loop = asyncio.new_event_loop()
    runner = app_runner(create_app(cast(Any, llm), ServerConfig()))

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(start(), loop).result(5)
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
