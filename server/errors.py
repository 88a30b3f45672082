"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from pagedjax import QueueFull, RequestError

REQUEST_ID: web.RequestKey[str] = web.RequestKey("REQUEST_ID", str)

MAX_RETRY_AFTER = 600  # seconds

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}

_log = logging.getLogger("pagedjax.server")


class ApiError(Exception):
    """An answer that is an error: HTTP status, what went wrong, and the field (``param``) to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field to blame."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """A 503 that says in how many seconds to come back."""
    return ApiError(503, message, headers=_come_back(retry_after))


def _come_back(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(math.ceil(min(max(seconds, 1.0), MAX_RETRY_AFTER)))}


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """What the client is told about ``error``; what is our own fault is logged under ``request_id``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers=_come_back(error.retry_after))
    if isinstance(error, web.HTTPException):
        return _http_error(error)
    if isinstance(error, RequestError):
        _log.error("request failed in the engine: %s", error, extra={"request_id": request_id})
    else:
        _log.error("request failed", exc_info=error, extra={"request_id": request_id})
    return ApiError(500, f"internal error: the server's log has more under {request_id}", code="internal_error")


def _http_error(error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "no such path", code="unknown_path")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not allowed here: use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "the request's body is too large", code="body_too_large")
    return ApiError(error.status, error.reason)
