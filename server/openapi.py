"""``GET /openapi.json``: made of the endpoints' own table and of the models that check their requests."""

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from server.fields import RequestBody
from server.gate import OPEN_PATHS, Handler

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field to blame."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_PROBLEMS = {
    "400": "A field is wrong, unknown or not supported; `param` names it.",
    "401": "No key, or a wrong one.",
    "404": "There is no such model.",
    "408": "The request took longer than it may.",
    "413": "The body is too large.",
    "429": "The queue is full: `Retry-After` says when to come back.",
    "500": "A fault of the server's, whose log has more under the request's id.",
    "503": "The server is loading or shutting down.",
}


@dataclass(frozen=True)
class Endpoint:
    """One path and what answers it.

    Attributes:
        method: GET or POST.
        path: as aiohttp writes it.
        handler: of aiohttp.
        summary: one line.
        bodies: models, one of which the request's JSON must be.
        answers: media types of an answer that is no error.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    bodies: tuple[type[RequestBody], ...] = ()
    answers: tuple[str, ...] = ("application/json",)

    @property
    def route(self) -> web.RouteDef:
        """For aiohttp's router."""
        return web.get(self.path, self.handler) if self.method == "GET" else web.post(self.path, self.handler)

    def operation(self) -> dict[str, Any]:
        """The endpoint as an OpenAPI operation."""
        problems = _PROBLEMS if self.bodies else {code: _PROBLEMS[code] for code in ("401", "404", "503")}
        error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
        answers = {"200": {"description": "It worked.", "content": {kind: {} for kind in self.answers}}}
        answers |= {code: {"description": text, "content": error} for code, text in problems.items()}
        operation: dict[str, Any] = {"summary": self.summary, "responses": answers}
        if self.bodies:
            schemas = [{"$ref": _REF.format(model=model.__name__)} for model in self.bodies]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if "{id" in self.path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        if self.path in OPEN_PATHS:
            operation["security"] = []
        return operation


def document(endpoints: Iterable[Endpoint], model_name: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server with these endpoints and this model (an empty name: not known yet)."""
    listed = list(endpoints)
    models = dict.fromkeys(model for endpoint in listed for model in endpoint.bodies)
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    schemas = found.get("$defs", {})
    for schema in schemas.values():
        if model_name and "model" in schema.get("properties", {}):
            schema["properties"]["model"]["enum"] = [model_name]
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in listed:
        path = endpoint.path.replace(":.+", "")  # aiohttp's way to let an id have slashes
        paths.setdefault(path, {})[endpoint.method.lower()] = endpoint.operation()
    return {
        "openapi": "3.1.0",
        "info": {"title": "pagedjax", "version": version()},
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def version() -> str:
    """Of pagedjax, as installed."""
    try:
        return importlib.metadata.version("pagedjax")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"
