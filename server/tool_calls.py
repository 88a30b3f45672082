"""Calls of functions in what a model says: the formats of the supported families, read as the text arrives.

Each family was trained to write its calls in a way of its own. A call is reported when it is there as a whole: what
turns out to be none is text after all, and nothing is lost. So the pieces of a stream join to what is not streamed,
however the text was cut.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


# The calls that a text begins with and how far they reach; None while more has to come to tell. No calls: so far it is
# text. What is found must not depend on how much more there is, or it would depend on how the text was cut.
Found = tuple[Sequence[ToolCall], int] | None


@dataclass(frozen=True)
class Format:
    """How a family writes its calls.

    Attributes:
        marks: texts that calls begin with.
        read: reads calls off a text that begins with a mark; told whether the text has ended.
        only_first: calls are the whole of an answer, or there are none.
        sign: what a chat template holds whose model writes this format.
    """

    marks: tuple[str, ...]
    read: Callable[[str, bool], Found]
    only_first: bool
    sign: str


class ToolCallReader:
    """Parts an answer into text and calls."""

    def __init__(self, format_: Format):
        self._format = format_
        self._held = ""
        self._is_first = True  # nothing but white space has come so far
        self._in_call = False
        self._after_call = False  # nothing has come since a call: white space is part of the format

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is known once this text has come."""
        self._held += text
        return self._go_on(ended=False)

    def finish(self) -> list[str | ToolCall]:
        """What is left when the answer has ended."""
        return self._go_on(ended=True)

    def _go_on(self, *, ended: bool) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while True:
            if not self._in_call:
                self._take_text(found, self._find(ended=ended))
                if not self._in_call:
                    return found
            result = self._format.read(self._held, ended)
            if result is None:
                return found
            calls, end = result
            self._in_call = False
            if calls:
                found += calls
                self._held = self._held[end:]
                self._is_first, self._after_call = False, True
            else:
                self._take_text(found, end)

    def _take_text(self, found: list[str | ToolCall], end: int) -> None:
        text, self._held = self._held[:end], self._held[end:]
        if self._after_call:
            text = text.lstrip()
        if text:
            found.append(text)
            self._after_call = False
        self._is_first = self._is_first and not text.strip()

    def _find(self, *, ended: bool) -> int:
        """Where the text ends: at a mark, or at what may become one."""
        first = len(self._held) - len(self._held.lstrip())
        for at in [first] if self._format.only_first else range(len(self._held)):
            if self._format.only_first and not self._is_first:
                break
            rest = self._held[at:]
            if any(rest.startswith(mark) for mark in self._format.marks):
                self._in_call = True
                return at
            if not ended and any(mark.startswith(rest) for mark in self._format.marks):
                return at
        return len(self._held)


# ---- the formats ----


def _call(value: Any) -> ToolCall | None:
    """A call from its JSON object; models write ``arguments`` or ``parameters``, and some the text of an object."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _skip(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip())


def _read_hermes(text: str, ended: bool) -> Found:
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""
    begin, close = "<tool_call>", "</tool_call>"
    no_call: Found = ([], len(begin))
    values, end = _decoded(text, _skip(text, len(begin)))
    if values is None:
        # In a string of the JSON the mark ends nothing.
        outside = re.sub(r'"(?:[^"\\]|\\.)*("|\\?$)', "", text[len(begin) :], flags=re.DOTALL)
        return no_call if ended or close in outside else None
    call, end = _call(values[0]), _skip(text, end)
    if call is None:
        return no_call
    if text.startswith(close, end):
        return [call], end + len(close)
    if close.startswith(text[end:]):  # where the answer ends so, the mark may be missing
        return ([call], len(text)) if ended else None
    return no_call


def _read_mistral(text: str, ended: bool) -> Found:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` with the mark before each."""
    mark = "[TOOL_CALLS]"
    no_call: Found = ([], len(mark))
    at = _skip(text, len(mark))
    if text.startswith("[", at):
        return _read_array(text, at) or (no_call if ended else None)
    named = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\])?\s*(?=\{)").match(text, at)
    values, end = _decoded(text, named.end()) if named else (None, at)
    if named is None or values is None:
        return no_call if ended else None
    call = _call({"name": named[1], "arguments": values[0]})
    return ([call], end) if call else no_call


def _read_array(text: str, at: int) -> Found:
    """A JSON array of calls; None where it is none so far."""
    values, end = _decoded(text, at)
    if values is None:
        return None
    calls = [call for call in map(_call, values[0]) if call]
    return (calls, end) if calls and len(calls) == len(values[0]) else ([], end)


def _read_forced(text: str, ended: bool) -> Found:
    """A JSON array of ``{"name": ..., "parameters": ...}``: what `forced_schema` asks for."""
    return _read_array(text, 0) or (([], len(text)) if ended else None)


def _decoded(text: str, at: int) -> tuple[list[Any] | None, int]:
    """The JSON value at a place, in a list, and where it ends; None where there is none, or not all of it."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return [value], end


def _read_llama(text: str, ended: bool) -> Found:
    """``{"name": ..., "parameters": ...}``, several with ``;`` between them, perhaps behind ``<|python_tag|>``."""
    if not ended:
        return None
    at = _skip(text, len("<|python_tag|>")) if text.startswith("<|python_tag|>") else 0
    calls = []
    while at < len(text):
        values, at = _decoded(text, at)
        call = _call(values[0]) if values else None
        if call is None:
            return [], len(text)
        calls.append(call)
        at = _skip(text, at)
        if text.startswith(";", at):
            at = _skip(text, at + 1)
    return calls, at


def _read_pythonic(text: str, ended: bool) -> Found:
    """``[name(argument=value, ...), ...]`` with literals for values."""
    if not ended:
        return None
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(listed, ast.List):
            return [], len(text)
        calls = [_python_call(node) for node in listed.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return [], len(text)
    return calls, len(text)


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg}
    if len(arguments) != len(node.keywords):
        raise ValueError("not a call with named arguments")
    return ToolCall(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


FORMATS = {
    "hermes": Format(("<tool_call>",), _read_hermes, only_first=False, sign="<tool_call>"),
    "mistral": Format(("[TOOL_CALLS]",), _read_mistral, only_first=False, sign="[TOOL_CALLS]"),
    "llama3_json": Format(("<|python_tag|>", "{"), _read_llama, only_first=True, sign="<|python_tag|>"),
    "pythonic": Format(("[",), _read_pythonic, only_first=True, sign="[func_name1("),
}
FORCED = Format(("[",), _read_forced, only_first=True, sign="")


def format_of(template: str) -> str | None:
    """The format that a chat template's model writes, by what stands in it; None where nothing tells.

    Llama 3's templates say "parameters" and know the role ipython.
    """
    for name, format_ in FORMATS.items():
        if format_.sign in template:
            return name
    return "llama3_json" if "ipython" in template else None


def forced_schema(tools: Sequence[tuple[str, dict[str, Any] | None]], *, several: bool) -> dict[str, Any]:
    """A JSON schema of calls of these functions, each a name and the schema of its arguments; one call at least."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in tools
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return schema if several else schema | {"maxItems": 1}
