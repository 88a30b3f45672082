"""What is wrong is refused by name, in OpenAI's shape, and holds nothing."""

import gzip
import io
import json
from typing import Any

import pytest
from fake_engine import FakeLLM, byte_tokenizer

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
)
HELLO = [{"role": "user", "content": "Hi"}]
VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "tiny", "prompt": "Hi", "max_tokens": 4},
    CHAT: {"model": "tiny", "messages": HELLO, "max_tokens": 4},
    TOKENIZE: {"model": "tiny", "prompt": "Hi"},
    DETOKENIZE: {"model": "tiny", "tokens": [1, 2]},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
BOTH = (COMPLETIONS, CHAT)
NOT_FOR_BEAMS: dict[str, Any] = {
    "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": 1}, "allowed_token_ids": [5], "bad_words": ["x"],
    "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1, "prompt_logprobs": 0, "priority": 1,
    "stop": "x", "stop_token_ids": [5], "include_stop_str_in_output": True, "min_tokens": 1,
    "skip_special_tokens": False,
}  # fmt: skip

# paths, fields that are changed, the status, the param that is named
WRONG: list[tuple[tuple[str, ...], dict[str, Any], int, str]] = [
    ((*BOTH, TOKENIZE, DETOKENIZE), {"model": None}, 400, "model"),
    ((*BOTH, TOKENIZE, DETOKENIZE), {"model": "other"}, 404, "model"),
    ((*BOTH, TOKENIZE, DETOKENIZE), {"model": 7}, 400, "model"),
    ((*BOTH, TOKENIZE, DETOKENIZE), {"colour": "red"}, 400, "colour"),
    (BOTH, {"temperature": -0.1}, 400, "temperature"),
    (BOTH, {"temperature": 2.1}, 400, "temperature"),
    (BOTH, {"temperature": "1"}, 400, "temperature"),
    (BOTH, {"temperature": True}, 400, "temperature"),
    (BOTH, {"top_p": 0}, 400, "top_p"),
    (BOTH, {"top_p": 1.5}, 400, "top_p"),
    (BOTH, {"top_k": -2}, 400, "top_k"),
    (BOTH, {"top_k": 1.5}, 400, "top_k"),
    (BOTH, {"min_p": 2}, 400, "min_p"),
    (BOTH, {"n": 0}, 400, "n"),
    (BOTH, {"n": 129}, 400, "n"),
    (BOTH, {"n": 1.5}, 400, "n"),
    (BOTH, {"n": 10**30}, 400, "n"),
    (BOTH, {"presence_penalty": 2.5}, 400, "presence_penalty"),
    (BOTH, {"frequency_penalty": -2.5}, 400, "frequency_penalty"),
    (BOTH, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (BOTH, {"seed": "x"}, 400, "seed"),
    (BOTH, {"seed": 2**70}, 400, "seed"),
    (BOTH, {"stop": 5}, 400, "stop"),
    (BOTH, {"stop": [""]}, 400, "stop"),
    (BOTH, {"stop": ["a", 1]}, 400, "stop"),
    (BOTH, {"stop": ["a"] * 17}, 400, "stop"),
    (BOTH, {"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (BOTH, {"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]"),
    (BOTH, {"logit_bias": {"a": 1}}, 400, "logit_bias"),
    (BOTH, {"logit_bias": {"5": "x"}}, 400, "logit_bias"),
    (BOTH, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    (BOTH, {"logit_bias": {"-5": 1}}, 400, "logit_bias"),
    (BOTH, {"logit_bias": [1]}, 400, "logit_bias"),
    (BOTH, {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    (BOTH, {"allowed_token_ids": [True]}, 400, "allowed_token_ids[0]"),
    (BOTH, {"bad_words": [""]}, 400, "bad_words"),
    (BOTH, {"max_tokens": -1}, 400, "max_tokens"),
    (BOTH, {"max_tokens": "4"}, 400, "max_tokens"),
    (BOTH, {"min_tokens": 5}, 400, "min_tokens"),
    (BOTH, {"min_tokens": -1}, 400, "min_tokens"),
    (BOTH, {"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    (BOTH, {"stream": "yes"}, 400, "stream"),
    (BOTH, {"timeout": 0}, 400, "timeout"),
    (BOTH, {"timeout": "1"}, 400, "timeout"),
    (BOTH, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (BOTH, {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    (
        BOTH,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options.include_obfuscation",
    ),
    (BOTH, {"ignore_eos": 1}, 400, "ignore_eos"),
    (BOTH, {"user": 5}, 400, "user"),
    (BOTH, {"store": True}, 400, "store"),
    (BOTH, {"service_tier": "priority"}, 400, "service_tier"),
    (BOTH, {"priority": 1}, 400, "priority"),
    (BOTH, {"priority": False}, 400, "priority"),
    (BOTH, {"priority": "high"}, 400, "priority"),
    (BOTH, {"priority": 2**40}, 400, "priority"),
    (BOTH, {"cache_salt": ""}, 400, "cache_salt"),
    (BOTH, {"cache_salt": "x" * 257}, 400, "cache_salt"),
    (BOTH, {"cache_salt": 7}, 400, "cache_salt"),
    (BOTH, {"best_of": 129}, 400, "best_of"),
    (BOTH, {"best_of": "2"}, 400, "best_of"),
    (BOTH, {"n": 3, "best_of": 2}, 400, "best_of"),
    (BOTH, {"best_of": 2, "stream": True}, 400, "best_of"),
    (BOTH, {"use_beam_search": "yes"}, 400, "use_beam_search"),
    (BOTH, {"length_penalty": 2.0}, 400, "length_penalty"),
    (BOTH, {"early_stopping": True}, 400, "early_stopping"),
    (BOTH, {"early_stopping": "never"}, 400, "early_stopping"),
    (BOTH, {"early_stopping": "often"}, 400, "early_stopping"),
    (BOTH, {"early_stopping": 0}, 400, "early_stopping"),
    (BOTH, {"use_beam_search": True, "n": 129}, 400, "n"),
    (BOTH, {"use_beam_search": True, "n": 0, "best_of": 4}, 400, "n"),
    (BOTH, {"use_beam_search": True, "n": 3, "best_of": 2}, 400, "best_of"),
    (BOTH, {"use_beam_search": True, "n": 17}, 400, "n"),  # the engine's limit
    (BOTH, {"use_beam_search": True, "best_of": 17}, 400, "best_of"),
    (BOTH, {"use_beam_search": True, "length_penalty": 5.0}, 400, "length_penalty"),
    (BOTH, {"use_beam_search": True, "length_penalty": "1"}, 400, "length_penalty"),
    (BOTH, {"use_beam_search": True, "max_tokens": 0}, 400, "max_tokens"),
    *((BOTH, {"use_beam_search": True, "temperature": t}, 400, "temperature") for t in (0.5, 2, 3)),
    *((BOTH, {"use_beam_search": True, name: value}, 400, name) for name, value in NOT_FOR_BEAMS.items()),
    ((COMPLETIONS,), {"use_beam_search": True, "logprobs": 0}, 400, "logprobs"),
    ((COMPLETIONS,), {"use_beam_search": True, "echo": True, "logprobs": 0}, 400, "logprobs"),
    ((CHAT,), {"use_beam_search": True, "logprobs": True}, 400, "logprobs"),
    ((CHAT,), {"use_beam_search": True, "logprobs": True, "top_logprobs": 2}, 400, "logprobs"),
    (BOTH, {"guided_json": {}}, 400, "guided_json"),
    ((COMPLETIONS,), {"prompt": None}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": []}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [[]]}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [1, "a"]}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [-1]}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [1.0]}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [[1], [True]]}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": {"text": "Hi"}}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [999]}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": ["a"] * 1025}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": [[1]] * 1025}, 400, "prompt"),
    ((COMPLETIONS,), {"prompt": ["a", "b" * 300]}, 400, "prompt"),
    ((COMPLETIONS,), {"max_tokens": 255}, 400, "prompt"),
    ((COMPLETIONS,), {"logprobs": 21}, 400, "logprobs"),
    ((COMPLETIONS,), {"logprobs": -1}, 400, "logprobs"),
    ((COMPLETIONS,), {"logprobs": True}, 400, "logprobs"),
    ((COMPLETIONS,), {"suffix": "end"}, 400, "suffix"),
    ((COMPLETIONS,), {"echo": "yes"}, 400, "echo"),
    ((COMPLETIONS,), {"messages": HELLO}, 400, "messages"),
    ((CHAT,), {"messages": None}, 400, "messages"),
    ((CHAT,), {"messages": []}, 400, "messages"),
    ((CHAT,), {"messages": "Hi"}, 400, "messages"),
    ((CHAT,), {"messages": ["Hi"]}, 400, "messages[0]"),
    ((CHAT,), {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ((CHAT,), {"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ((CHAT,), {"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
    ((CHAT,), {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages[0].content"),
    ((CHAT,), {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content"),
    ((CHAT,), {"messages": [{"role": "king", "content": "Hi"}]}, 400, "messages[0].role"),
    ((CHAT,), {"messages": [{"role": "tool", "content": "Hi"}]}, 400, "messages[0].role"),
    ((CHAT,), {"messages": [{"role": [], "content": "Hi"}]}, 400, "messages[0].role"),
    (
        (CHAT,),
        {"messages": [*HELLO, {"role": "user", "content": "Hi", "tool_calls": [1]}]},
        400,
        "messages[1].tool_calls",
    ),
    ((CHAT,), {"messages": [{"role": "user", "content": "Hi", "mood": 1}]}, 400, "messages[0].mood"),
    (
        (CHAT,),
        {"messages": [{"role": "assistant", "content": "Hi"}]},
        400,
        "messages",
    ),  # the template refuses it
    ((CHAT,), {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages"),
    ((CHAT,), {"prompt": "Hi"}, 400, "prompt"),
    ((CHAT,), {"max_tokens": 0}, 400, "max_tokens"),
    ((CHAT,), {"max_tokens": None, "max_completion_tokens": -1}, 400, "max_completion_tokens"),
    ((CHAT,), {"max_tokens": None, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ((CHAT,), {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens"),
    ((CHAT,), {"logprobs": 3}, 400, "logprobs"),
    ((CHAT,), {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ((CHAT,), {"top_logprobs": 2}, 400, "top_logprobs"),
    ((CHAT,), {"echo": True}, 400, "echo"),
    (BOTH, {"response_format": {"type": "yaml"}}, 400, "response_format.type"),
    ((CHAT,), {"tools": [FUNCTION]}, 400, "tools"),
    ((CHAT,), {"tool_choice": "required"}, 400, "tool_choice"),
    ((CHAT,), {"functions": [{"name": "f"}]}, 400, "functions"),
    ((CHAT,), {"modalities": ["text", "audio"]}, 400, "modalities"),
    ((CHAT,), {"audio": {"voice": "alloy", "format": "wav"}}, 400, "audio"),
    ((CHAT,), {"prediction": {"type": "content", "content": "x"}}, 400, "prediction"),
    ((CHAT,), {"reasoning_effort": "high"}, 400, "reasoning_effort"),
    ((CHAT,), {"web_search_options": {}}, 400, "web_search_options"),
    (
        (CHAT, TOKENIZE),
        {"messages": HELLO, "prompt": None, "chat_template_kwargs": []},
        400,
        "chat_template_kwargs",
    ),
    ((CHAT,), {"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ((CHAT,), {"add_generation_prompt": True, "continue_final_message": True}, 400, "continue_final_message"),
    ((TOKENIZE,), {"prompt": None}, 400, "prompt"),
    ((TOKENIZE,), {"prompt": ["a"]}, 400, "prompt"),
    ((TOKENIZE,), {"messages": HELLO}, 400, "prompt"),
    ((DETOKENIZE,), {"tokens": None}, 400, "tokens"),
    ((DETOKENIZE,), {"tokens": ["a"]}, 400, "tokens[0]"),
    ((DETOKENIZE,), {"tokens": [258]}, 400, "tokens"),
    ((DETOKENIZE,), {"tokens": [-1]}, 400, "tokens"),
]
ROWS = [(path, change, status, param) for paths, change, status, param in WRONG for path in paths]


def check_error(body: Any, param: str | None = None) -> dict[str, Any]:
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize("path", VALID)
async def test_the_rows_start_from_what_is_right(served: Any, path: str) -> None:
    status, body = await served.post(path, VALID[path])
    assert status == 200, body


async def test_wrong_fields(served: Any, llm: FakeLLM) -> None:
    assert len(ROWS) >= 120
    for path, change, wanted, param in ROWS:
        status, body = await served.post(path, VALID[path] | change)
        assert status == wanted, (path, change, body)
        error = check_error(body, param)
        assert error["type"] == "invalid_request_error"
        name = param.partition("[")[0].partition(".")[0]
        assert name in error["message"] or param == "messages", (path, change, error)
    assert not llm.running


@pytest.mark.parametrize("path", BOTH)
async def test_what_changes_nothing_is_accepted(served: Any, path: str) -> None:
    nothing: dict[str, Any] = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "stream": False,
        "temperature": None,
        "stop": None,
        "logit_bias": None,
        "stream_options": None,
        "priority": 0,
        "n": None,
        "cache_salt": None,
        "use_beam_search": False,
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "top_k": -1,
        "best_of": 1,
        "length_penalty": 1,
        "early_stopping": False,
    }
    if path == CHAT:
        nothing |= {
            "tools": [],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "modalities": ["text"],
        }
        nothing |= {
            "max_completion_tokens": 4,
            "parallel_tool_calls": True,
            "functions": None,
            "logprobs": False,
        }
    else:
        nothing |= {"suffix": None, "echo": False}
    status, body = await served.post(path, VALID[path] | nothing)
    assert status == 200, body


BROKEN_BODIES = {
    "no JSON": b"{",
    "nothing": b"",
    "not an object": b"[1]",
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "bad UTF-8": b'{"model": "tiny", "prompt": "\xff"}',
    "lone surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "long number": b'{"n": 1' + b"0" * 100_000 + b"}",
}


@pytest.mark.parametrize("kind", BROKEN_BODIES)
async def test_broken_bodies(served: Any, kind: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in VALID:
        status, body = await served.post(path, data=BROKEN_BODIES[kind], headers=headers)
        assert status == 400
        assert check_error(body)["code"] == "bad_json"


async def test_infinite_numbers(served: Any) -> None:
    data = b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'
    status, body = await served.post(COMPLETIONS, data=data, headers={"Content-Type": "application/json"})
    assert status == 400
    check_error(body, "temperature")


async def test_encodings(served: Any) -> None:
    good = json.dumps(VALID[COMPLETIONS]).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    status, _ = await served.post(COMPLETIONS, data=gzip.compress(good), headers=headers)
    assert status == 200
    for data in (b"this is no gzip", gzip.compress(good)[:-12]):
        status, body = await served.post(COMPLETIONS, data=data, headers=headers)
        assert status == 400
        check_error(body)
    status, body = await served.post(COMPLETIONS, data=gzip.compress(b" " * (65 * 2**20)), headers=headers)
    assert status == 413
    check_error(body)


async def test_content_type(served: Any) -> None:
    data = json.dumps(VALID[COMPLETIONS]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"):
        status, body = await served.post(COMPLETIONS, data=data, headers={"Content-Type": kind})
        assert status == 400
        assert check_error(body)["code"] == "bad_content_type"
    for kind in ("application/json", "application/json; charset=UTF-8", "application/vnd.x+json"):
        status, _ = await served.post(COMPLETIONS, data=data, headers={"Content-Type": kind})
        assert status == 200


async def test_too_large(served: Any) -> None:
    data = io.BytesIO(b" " * (64 * 2**20 + 1))
    status, body = await served.post(COMPLETIONS, data=data, headers={"Content-Type": "application/json"})
    assert status == 413
    check_error(body)


async def test_paths_and_methods(served: Any) -> None:
    for path, status, code in (
        ("/v1/nothing", 404, "unknown_path"),
        ("/", 404, "not_built"),
        ("/openapi.json", 404, "not_built"),
        (COMPLETIONS, 405, "method_not_allowed"),
    ):
        found, body = await served.get(path)
        assert found == status
        assert check_error(body)["code"] == code
    status, body = await served.post("/v1/embeddings", {"model": "tiny", "input": "x"})
    assert status == 400
    assert "not built yet" in check_error(body, "model")["message"]


async def test_without_a_template_or_a_tokenizer(served_with: Any) -> None:
    served = await served_with(engine=FakeLLM(tokenizer=byte_tokenizer(template=None)))
    status, body = await served.post(CHAT, VALID[CHAT])
    assert status == 400
    assert "no chat template" in check_error(body, "messages")["message"]

    served = await served_with(engine=FakeLLM(tokenizer=None))
    for path, param in (
        (CHAT, "messages"),
        (COMPLETIONS, "prompt"),
        (TOKENIZE, "model"),
        (DETOKENIZE, "model"),
    ):
        status, body = await served.post(path, VALID[path])
        assert status == 400
        check_error(body, param)
    status, body = await served.post(COMPLETIONS, {"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "logprobs": 1})
    assert status == 200
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:0", "token_id:1"]


async def test_a_prompt_may_have_more_tokens_than_a_request_may_have_prompts(served: Any, llm: FakeLLM) -> None:
    llm.max_model_len = 4096
    status, _ = await served.post(COMPLETIONS, VALID[COMPLETIONS] | {"prompt": [1] * 1025})
    assert status == 200


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a" * 10_000] * 17),
        ("bad_words", ["a" * 10_000, ""]),
        ("stop_token_ids", [1] * 10_000 + [-1]),
        ("n", 10**3000),
        ("cache_salt", "a" * 10_000),
        ("early_stopping", "a" * 10_000),
        ("seed", 10**3000),
    ],
)
async def test_a_huge_value_is_not_sent_back(served: Any, path: str, field: str, value: Any) -> None:
    status, body = await served.post(path, VALID[path] | {field: value})
    assert status == 400
    message = check_error(body, field)["message"]
    assert message.startswith(field)
    assert len(message) < 400
