"""Read a request's body into a typed model, whatever the client has sent."""

import logging
import zlib
from typing import Any

import pydantic_core
from aiohttp import http_exceptions, web
from pydantic import ValidationError

from server.errors import REQUEST_ID, ApiError, bad_request
from server.fields import RequestBody, field_error
from server.state import STATE

MAX_BODY_BYTES = 64 * 2**20

# What users say, or say about themselves, is not for the log.
_TEXTS = {
    *("prompt", "messages", "tokens", "stop", "bad_words", "chat_template_kwargs"),
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt"),
}

_UNREADABLE = "unreadable_body"
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

_log = logging.getLogger("pagedjax.server")


async def read_body[Body: RequestBody](request: web.Request, model: type[Body]) -> Body:
    """The request's JSON body as ``model``.

    Raises:
        ApiError: 400 or 413; it names the field that is wrong, if one is.
    """
    return _validated(model, await _read_json(request), request)


async def read_either[Body: RequestBody, Other: RequestBody](
    request: web.Request, key: str, with_key: type[Body], without: type[Other]
) -> Body | Other:
    """The request's JSON body as one of two models: the first where it has ``key``.

    Raises:
        ApiError: as for `read_body`.
    """
    body = await _read_json(request)
    if body.get(key) is not None:
        return _validated(with_key, body, request)
    return _validated(without, body, request)


def _validated[Body: RequestBody](model: type[Body], data: dict[str, Any], request: web.Request) -> Body:
    try:
        body = model.model_validate(data)
    except ValidationError as error:
        raise field_error(error) from None
    if request.app[STATE].config.log_requests:
        parameters = body.model_dump(exclude_defaults=True, exclude=_TEXTS)
        about = {"request_id": request[REQUEST_ID], "parameters": parameters}
        _log.info("asked for %s", parameters, extra=about)
    return body


async def _read_json(request: web.Request) -> dict[str, Any]:
    _check_content_type(request)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        raw = await request.read()
    except (web.RequestPayloadError, http_exceptions.HttpProcessingError):
        raise bad_request("the request's body cannot be read: it is broken or cut short", code=_UNREADABLE) from None
    if encoding := request.headers.get("Content-Encoding"):
        raw = _decompressed(raw, encoding.strip().lower())
    try:
        body = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:  # also for UTF-8, lone surrogates and nesting
        raise bad_request(f"the request's body is not JSON: {error}", code="bad_json") from None
    if not isinstance(body, dict):
        raise bad_request("the request's body must be a JSON object", code="bad_json")
    return body


def _decompressed(raw: bytes, encoding: str) -> bytes:
    """The body behind its ``Content-Encoding``; aiohttp itself would break the connection over bad data."""
    if encoding == "identity":
        return raw
    if encoding not in _WINDOW_BITS:
        raise bad_request(f"the Content-Encoding {encoding!r:.40} is not supported: use gzip or none", code=_UNREADABLE)
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        body = decompressor.decompress(raw, MAX_BODY_BYTES + 1)
    except zlib.error:
        raise bad_request(f"the request's body is not {encoding}", code=_UNREADABLE) from None
    if len(body) > MAX_BODY_BYTES:
        raise _too_large()
    if not decompressor.eof or decompressor.unused_data:
        raise bad_request(f"the request's body is cut short or goes on after its {encoding}", code=_UNREADABLE)
    return body


def _too_large() -> ApiError:
    return ApiError(413, f"the request's body is over the limit of {MAX_BODY_BYTES} bytes", code="body_too_large")


def _check_content_type(request: web.Request) -> None:
    if "Content-Type" not in request.headers:
        return
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"the Content-Type is {kind}: send JSON with 'Content-Type: application/json'"
        raise bad_request(message, code="bad_content_type")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise bad_request(f"the charset is {request.charset}: send UTF-8", code="bad_content_type")
