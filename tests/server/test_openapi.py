"""``/openapi.json`` says what the server does, and requests drawn from it bring no fault to light."""

import json
from typing import Any

import jsonschema
import pytest
from fake_engine import FakeLLM

from server.handlers import endpoints, routes

MODELS = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatRequest",
          "/detokenize": "DetokenizeRequest"}  # fmt: skip


@pytest.fixture
async def document(served: Any) -> Any:
    status, body = await served.get("/openapi.json")
    assert status == 200
    return body


async def test_every_route_is_in_it(document: Any) -> None:
    listed = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert listed == {(route.method, route.path.replace(":.+", "")) for route in routes()}
    assert len(listed) == len(endpoints())


async def test_every_reference_leads_somewhere_and_every_schema_is_one(document: Any) -> None:
    schemas = document["components"]["schemas"]
    references = {part.split('"')[0] for part in json.dumps(document).split('"$ref": "')[1:]}
    assert references
    assert references <= {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "fields", "is_right"),
    [
        ("/v1/completions", {"prompt": "Hi"}, True),
        ("/v1/completions", {"prompt": [1, 2], "stop": ["a"], "logit_bias": {"5": 1.5}, "top_k": 3, "n": 2}, True),
        ("/v1/completions", {}, False),
        ("/v1/completions", {"prompt": "Hi", "temperature": "hot"}, False),
        ("/v1/completions", {"prompt": "Hi", "colour": "red"}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, True),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "Hi"}]}, False),
        ("/detokenize", {"tokens": [1]}, True),
        ("/detokenize", {"tokens": ["a"]}, False),
    ],
)
async def test_the_schema_says_what_the_server_does(
    document: Any, served: Any, path: str, fields: dict[str, Any], is_right: bool
) -> None:
    body = {"model": "tiny"} | fields
    schema = {"$ref": f"#/components/schemas/{MODELS[path]}", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == is_right
    status, _ = await served.post(path, body)
    assert (status == 200) == is_right


async def test_open_paths_need_no_key(served_with: Any, llm: FakeLLM) -> None:
    served = await served_with(api_keys=("one",))
    headers = {"Authorization": "Bearer one"}
    _, document = await served.get("/openapi.json", headers=headers)
    for path, item in document["paths"].items():
        if "get" in item and "{" not in path:
            async with served.session.get(served.url + path) as answer:
                assert (answer.status == 401) == (item["get"].get("security") != []), path
