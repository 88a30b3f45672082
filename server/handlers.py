"""The small endpoints: models, tokens, health, metrics, blocks, version, and those that are not built yet."""

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json

from pagedjax import AsyncLLM, Tokenizer
from server.body import read_body, read_either
from server.chat import chat_completions, chat_prompt
from server.completions import completions
from server.errors import ApiError, bad_request, unavailable
from server.gate import check_model
from server.openapi import Endpoint, document, version
from server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from server.state import STATE, ServerState


def endpoints() -> list[Endpoint]:
    """Every endpoint."""
    text, json_ = "text/plain", "application/json"
    streams = (json_, "text/event-stream")
    chat = (ChatRequest,)
    tokenize = (TokenizeTextRequest, TokenizeChatRequest)
    return [
        Endpoint("POST", "/v1/completions", completions, "Continue a text.", (CompletionRequest,), streams),
        Endpoint("POST", "/v1/chat/completions", chat_completions, "Continue a conversation.", chat, streams),
        Endpoint("POST", "/v1/embeddings", _embeddings, "Not built yet.", (ModelRequest,)),
        Endpoint("GET", "/v1/models", _models, "The model."),
        Endpoint("GET", "/v1/models/{id:.+}", _model, "The model, if that is its name."),
        Endpoint("POST", "/tokenize", _tokenize, "Token ids of a text or of a conversation.", tokenize),
        Endpoint("POST", "/detokenize", _detokenize, "Text of token ids.", (DetokenizeRequest,)),
        Endpoint("GET", "/health", _health, "Whether the server serves."),
        Endpoint("GET", "/metrics", _metrics, "What is counted, for Prometheus.", answers=(text,)),
        Endpoint("GET", "/version", _version, "The version of pagedjax."),
        Endpoint("GET", "/", _not_built, "Not built yet."),
        Endpoint("GET", "/debug/blocks", _blocks, "Every block of the KV cache, and every request."),
        Endpoint("GET", "/openapi.json", _openapi, "This document."),
    ]


def routes() -> list[web.RouteDef]:
    """Every endpoint, for aiohttp."""
    return [endpoint.route for endpoint in endpoints()]


async def _openapi(request: web.Request) -> web.Response:
    return web.json_response(document(endpoints(), request.app[STATE].model_name))


async def _models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return web.json_response({"object": "list", "data": [_model_card(state, state.engine())]})


async def _model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    llm = state.engine()
    check_model(state, request.match_info["id"])
    return web.json_response(_model_card(state, llm))


def _model_card(state: ServerState, llm: AsyncLLM) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.ready_time,
        "owned_by": "pagedjax",
        "root": llm.model_name,
        "parent": None,
        "max_model_len": llm.max_model_len,
    }


async def _tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    llm = state.engine()
    body = await read_either(request, "messages", TokenizeChatRequest, TokenizeTextRequest)
    check_model(state, body.model)
    tokenizer = _tokenizer(llm)
    text = await chat_prompt(llm, body) if isinstance(body, TokenizeChatRequest) else body.prompt
    tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=body.add_special_tokens)
    return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": llm.max_model_len})


async def _detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    llm = state.engine()
    body = await read_body(request, DetokenizeRequest)
    check_model(state, body.model)
    tokenizer = _tokenizer(llm)
    if not all(0 <= token < llm.vocab_size for token in body.tokens):
        raise bad_request(f"tokens must be from 0 to {llm.vocab_size - 1}", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return web.json_response({"prompt": text})


def _tokenizer(llm: AsyncLLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise bad_request("this model has no tokenizer: it takes token ids only", "model")
    return llm.tokenizer


async def _health(request: web.Request) -> web.Response:
    state = request.app[STATE]
    seconds = state.config.hang_timeout
    if not state.engine().is_healthy(seconds):
        raise unavailable(f"work waits, and no step has ended for {seconds:g} s")
    return web.json_response({"status": "ok"})


async def _metrics(request: web.Request) -> web.Response:
    state = request.app[STATE]
    text = state.loaded().metrics_registry.render(state.config.metrics_prefix, state.model_name)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _blocks(request: web.Request) -> web.Response:
    blocks = await request.app[STATE].loaded().blocks()
    return web.Response(body=to_json(blocks), content_type="application/json")


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": version()})


async def _embeddings(request: web.Request) -> web.Response:
    raise bad_request("/v1/embeddings is not built yet", "model", code="not_built")


async def _not_built(request: web.Request) -> web.Response:
    raise ApiError(404, f"{request.path} is not built yet", code="not_built")
