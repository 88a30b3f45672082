"""Calls in every format, cut in every way: what is streamed joins to what is not, and no text is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tool_calls import FORCED, FORMATS, Format, ToolCall, ToolCallReader, forced_schema, format_of

MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    ";",
    "[",
    "]",
    "{",
    "}",
    '"',
    "\\",
    "f(",
]
PIECES = [*MARKS, '{"name": "f", "arguments": {}}', "f[ARGS]{}"]
names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
texts = st.one_of(st.text(st.characters(codec="utf-8"), max_size=6), st.sampled_from(MARKS))
values = st.recursive(
    st.one_of(texts, st.integers(-99, 99), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
arguments = st.dictionaries(names.map("a{}".format), values, max_size=3)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)


def written(format_: str, made: list[tuple[str, dict[str, Any]]], spaced: bool) -> str:
    """Calls as a model of a family writes them."""
    space = "\n" if spaced else ""
    match format_:
        case "hermes":
            objects = [json.dumps({"name": n, "arguments": a}, ensure_ascii=spaced) for n, a in made]
            return space.join(f"<tool_call>{space}{text}{space}</tool_call>" for text in objects)
        case "mistral":
            if spaced:
                return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in made)
            return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in made])
        case "llama3_json":
            objects = [json.dumps({"name": n, "parameters": a}) for n, a in made]
            return ("<|python_tag|>" if spaced else "") + f";{space}".join(objects)
        case "pythonic":
            return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in made) + "]"
        case _:
            return json.dumps([{"name": n, "parameters": a} for n, a in made])


def read(format_: Format, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls, of a text that comes in pieces."""
    reader, found, last = ToolCallReader(format_), [], 0
    for cut in [*sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]:
        found += reader.feed(text[last:cut])
        last = cut
    found += reader.finish()
    said = "".join(part for part in found if isinstance(part, str))
    return said, [(part.name, json.loads(part.arguments)) for part in found if isinstance(part, ToolCall)]


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@settings(max_examples=150, deadline=None)
@given(made=calls, spaced=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_calls(name: str, made: list[tuple[str, Any]], spaced: bool, cuts: list[int]) -> None:
    text = written(name, made, spaced)
    assert read(FORMATS.get(name, FORCED), text, cuts) == ("", made)
    assert read(FORMATS.get(name, FORCED), text, list(range(len(text)))) == ("", made)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@settings(max_examples=100, deadline=None)
@given(made=calls, cuts=st.lists(st.integers(0, 400), max_size=12), before=texts.map("Well: {}.".format))
def test_text_before_calls(name: str, made: list[tuple[str, Any]], cuts: list[int], before: str) -> None:
    if any(mark in before for mark in FORMATS[name].marks):
        return
    assert read(FORMATS[name], before + written(name, made, False), cuts) == (before, made)


@pytest.mark.parametrize("name", [*FORMATS, "forced"])
@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.one_of(texts, st.sampled_from(PIECES)), max_size=8),
    cuts=st.lists(st.integers(0, 99), max_size=6),
)
def test_anything(name: str, pieces: list[str], cuts: list[int]) -> None:
    """However it is cut, the same comes of it; where no call is found, it is the text that it was."""
    text, format_ = "".join(pieces), FORMATS.get(name, FORCED)
    whole = read(format_, text, [])
    assert read(format_, text, cuts) == whole
    assert read(format_, text, list(range(len(text)))) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("name", "text", "said", "made"),
    [
        ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b', "a b", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", {"x": 1})]),
        ("hermes", "<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("hermes", "2 < 3 <tool", "2 < 3 <tool", []),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"x": 1}', "", [("f", {"x": 1})]),
        ("mistral", "[TOOL_CALLS]nothing", "[TOOL_CALLS]nothing", []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", 'So {"name": "f", "parameters": {}}', 'So {"name": "f", "parameters": {}}', []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[f(1)]", "[f(1)]", []),
        ("pythonic", "[os.getcwd(**x)]", "[os.getcwd(**x)]", []),
        ("pythonic", "[a.b(x=[1, None], y={'k': True})]", "", [("a.b", {"x": [1, None], "y": {"k": True}})]),
    ],
)
def test_examples(name: str, text: str, said: str, made: list[Any]) -> None:
    assert read(FORMATS[name], text, []) == (said, made)


def test_the_format_is_in_the_template() -> None:
    assert format_of("... within <tool_call></tool_call> XML tags") == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of('{"name": function name, "parameters": ...} <|python_tag|>') == "llama3_json"
    assert format_of("role == 'ipython'") == "llama3_json"
    assert format_of("{{ messages }}") is None


def test_the_schema_of_forced_calls() -> None:
    schema = forced_schema(
        [("f", {"type": "object", "properties": {"x": {"type": "integer"}}}), ("g", None)], several=True
    )
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "f"}
    assert second["properties"]["parameters"] == {"type": "object"}
    assert "maxItems" not in schema
    assert forced_schema([("g", None)], several=False)["maxItems"] == 1
