"""The server as an aiohttp application, and the process that runs it from its first signal to its last."""

import asyncio
import concurrent.futures
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from pagedjax import AsyncLLM, UserError
from server.body import MAX_BODY_BYTES
from server.config import ServerConfig
from server.gate import add_headers, allow_origin, answer_errors, check_key
from server.handlers import routes
from server.logs import configure_logs
from server.state import STATE, ServerState

LOADED: web.AppKey["asyncio.Future[AsyncLLM]"] = web.AppKey("LOADED", asyncio.Future)

_CLOSE_SECONDS = 2.0  # for answers that are on their way out when the server closes
_ENGINE_SECONDS = 10.0  # for the engine's step under way, after that

_log = logging.getLogger("pagedjax.server")


def create_app(engine: AsyncLLM | Callable[[], AsyncLLM], config: ServerConfig) -> web.Application:
    """The application around an engine, or around a function that makes one.

    A function is called in a thread when the application starts; until it returns, requests get a 503. The
    future under ``LOADED`` holds what came of it. The engine is shut down with the application.
    """
    app = web.Application(middlewares=[answer_errors, allow_origin, check_key], client_max_size=MAX_BODY_BYTES)
    app[STATE] = ServerState(config)
    app.add_routes(routes())
    app.on_response_prepare.append(add_headers)

    async def run_engine(app: web.Application) -> AsyncIterator[None]:
        state = app[STATE]
        loaded = _load(engine) if callable(engine) else _done(engine)
        loaded.add_done_callback(lambda future: None if _failed(future) else state.ready(future.result()))
        app[LOADED] = loaded
        yield
        if loaded.done() and not _failed(loaded):
            state.hangs = not await loaded.result().shutdown(timeout=_ENGINE_SECONDS)

    app.cleanup_ctx.append(run_engine)
    return app


def app_runner(app: web.Application) -> web.AppRunner:
    """Runs the application; what it needs of aiohttp beyond the defaults is set here."""
    return web.AppRunner(
        app,
        handler_cancellation=True,  # a client that hangs up ends its request
        auto_decompress=False,  # server.body does it
        access_log=None,  # server.gate does it
        shutdown_timeout=_CLOSE_SECONDS,
    )


def _done(llm: AsyncLLM) -> "asyncio.Future[AsyncLLM]":
    future = asyncio.get_running_loop().create_future()
    future.set_result(llm)
    return future


def _failed(future: "asyncio.Future[AsyncLLM]") -> bool:
    return future.cancelled() or future.exception() is not None


def _load(load: Callable[[], AsyncLLM]) -> "asyncio.Future[AsyncLLM]":
    """Call ``load`` in a thread that does not keep the process alive: nothing can interrupt it."""
    result: concurrent.futures.Future[AsyncLLM] = concurrent.futures.Future()

    def work() -> None:
        try:
            llm = load()
        except BaseException as error:  # noqa: BLE001 (who waits for the future raises it)
            result.set_exception(error)
        else:
            result.set_result(llm)

    threading.Thread(target=work, name="pagedjax-load", daemon=True).start()
    # Shielded, because a concurrent future that is cancelled cannot take the result that comes later.
    return asyncio.shield(asyncio.wrap_future(result))


def serve(config: ServerConfig, load: Callable[[], AsyncLLM]) -> int:
    """Serve the engine that ``load`` makes until SIGTERM or SIGINT; the exit status.

    The port is bound first and answers 503 while ``load`` runs. The first signal lets running requests end,
    within ``shutdown_timeout`` seconds; the second ends the process at once.

    Raises:
        UserError: the address is taken or wrong, a TLS file cannot be read, or ``load`` raised it.
    """
    configure_logs(config.log_level, config.log_format)
    tls = _tls(config)
    listener = _bind(config.host, config.port)
    with listener:
        all_ended = asyncio.run(_serve(config, load, listener, tls))
    if not all_ended:
        # What still runs in a thread, such as a compiler or a step, must not meet a half-gone interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


async def _serve(
    config: ServerConfig, load: Callable[[], AsyncLLM], listener: socket.socket, tls: ssl.SSLContext | None
) -> bool:
    """Serve until a signal; whether ``load`` had ended by then, and the engine too."""
    stop = _stop_on_signals()
    app = create_app(load, config)
    runner = app_runner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, ssl_context=tls, backlog=1024).start()
        stopping = asyncio.ensure_future(stop.wait())
        loaded = app[LOADED]
        futures: set[asyncio.Future[Any]] = {loaded, stopping}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            loaded.result()  # raises what load raised
            _announce(config, listener, tls)
            await stopping
        _log.info("shutting down: running requests have %g s", config.shutdown_timeout)
        await app[STATE].drain()
        load_ended = loaded.done()
    finally:
        await runner.cleanup()
    if app[STATE].hangs:
        _log.warning("the engine did not end within %g s: leaving without it", _ENGINE_SECONDS)
    return load_ended and not app[STATE].hangs


def _announce(config: ServerConfig, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
    if not config.api_keys and not _is_private(listener):
        _log.warning("anyone who reaches %s can use this server: set --api-key", config.host)
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if tls else "http"
    sys.stderr.write(f"pagedjax: ready on {scheme}://{host}:{listener.getsockname()[1]}\n")
    sys.stderr.flush()


def _is_private(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except socket.gaierror as error:
        raise UserError(f"--host {host} is no address of this machine: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken: choose another with --port, or --port 0 for any free one"
        elif error.errno == errno.EACCES:
            message = f"port {port} needs more rights than this user has: choose one above 1023 with --port"
        else:
            message = f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}; see --host and --port"
        raise UserError(message) from None


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile}"
        raise UserError(f"{files} cannot be used: {error}") from None
    return context
