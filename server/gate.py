"""What every request passes: an id, the key, CORS, the log line, and errors in one shape."""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from server.errors import REQUEST_ID, ApiError, as_api_error
from server.state import STATE, ServerState

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})  # for probes and scrapers, which have no key

CLIENT_CLOSED = 499  # in the log only: nobody is there to be answered

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_log = logging.getLogger("pagedjax.server")


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, turn errors into answers, and log the request."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    start = time.monotonic()
    status = CLIENT_CLOSED
    try:
        response = await _answer(request, handler)
        status = response.status
    finally:
        milliseconds = round(1000 * (time.monotonic() - start), 1)
        level = logging.DEBUG if request.path in OPEN_PATHS else logging.INFO
        about = {
            "request_id": request[REQUEST_ID],
            "method": request.method,
            "path": request.path,
            "status": status,
        }
        message = ("%s %r %d in %s ms", request.method, request.path, status, milliseconds)
        _log.log(level, *message, extra=about | {"milliseconds": milliseconds})
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:  # noqa: BLE001 (it becomes an answer, and what is our fault a line in the log)
        refusal = as_api_error(error, request[REQUEST_ID])
        return web.json_response(refusal.body(), status=refusal.status, headers=refusal.headers)


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let in who has a key, where keys are set."""
    keys = request.app[STATE].config.api_keys
    if not keys or request.path in OPEN_PATHS:
        return await handler(request)
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    sent = key.strip().encode("utf-8", "surrogateescape")
    # Every key is compared in full, so that the time says nothing about how much of one was right.
    matches = [hmac.compare_digest(sent, known.encode()) for known in keys]
    if scheme.lower() != "bearer" or not any(matches):
        message = "this server wants a key it knows: send 'Authorization: Bearer KEY'"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return await handler(request)


@web.middleware
async def allow_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer browsers' preflight requests, where an origin is allowed."""
    asked = request.headers.get("Access-Control-Request-Method")
    if not (request.app[STATE].config.cors_origin and request.method == "OPTIONS" and asked):
        return await handler(request)
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
    if wanted := request.headers.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(status=204, headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's id, and the origin that is allowed, on every answer (a signal of aiohttp)."""
    if request_id := request.get(REQUEST_ID):
        response.headers["X-Request-Id"] = request_id
    if origin := request.app[STATE].config.cors_origin:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if origin != "*":
            response.headers["Vary"] = "Origin"


def check_model(state: ServerState, name: str) -> None:
    """Refuse a model that is not the one served.

    Raises:
        ApiError: 404.
    """
    if name != state.model_name:
        message = f"the model {name!r:.200} does not exist: this server has {state.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
