"""The small endpoints: models, tokens, health, metrics, blocks, version, and those that are not built yet."""

import asyncio
import importlib.metadata
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
from server.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from server.state import STATE, ServerState


def routes() -> list[web.RouteDef]:
    """Every endpoint."""
    return [
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", chat_completions),
        web.post("/v1/embeddings", _embeddings),
        web.get("/v1/models", _models),
        web.get("/v1/models/{id:.+}", _model),
        web.post("/tokenize", _tokenize),
        web.post("/detokenize", _detokenize),
        web.get("/health", _health),
        web.get("/metrics", _metrics),
        web.get("/version", _version),
        web.get("/", _not_built),
        web.get("/debug/blocks", _blocks),
        web.get("/openapi.json", _not_built),
    ]


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
    try:
        version = importlib.metadata.version("pagedjax")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        version = "unknown"
    return web.json_response({"version": version})


async def _embeddings(request: web.Request) -> web.Response:
    raise bad_request("/v1/embeddings is not built yet", "model", code="not_built")


async def _not_built(request: web.Request) -> web.Response:
    raise ApiError(404, f"{request.path} is not built yet", code="not_built")
