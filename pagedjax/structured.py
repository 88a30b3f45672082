"""What an output must look like: the user's words for it. ``grammars`` makes them into masks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

MAX_GRAMMAR_BYTES = 64 * 2**10  # of a schema, regex, grammar or all choices, as UTF-8
MAX_CHOICES = 1024


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must match, from its first token to its last; one of the fields.

    Attributes:
        json: a JSON schema, as an object or as its text.
        json_object: any JSON object.
        regex: a regular expression, in the syntax of Rust's ``regex`` without look-around; it covers the whole output.
        choice: the texts to choose from.
        grammar: a context-free grammar, in Lark's syntax or llama.cpp's GBNF.

    Raises:
        ValueError: none or several are given, or a value is of the wrong kind or too large; the message begins with
            ``structured_outputs``.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(f"structured_outputs must have one of {names}, and has {', '.join(given) or 'none'}")
        [name] = given
        value = getattr(self, name)
        rules: dict[str, tuple[str, Any]] = {
            "json": ("a JSON schema: an object, or its text", str | dict),
            "json_object": ("true or false", bool),
            "regex": ("a text", str),
            "choice": (f"a list of 1 to {MAX_CHOICES} texts that are not empty", Sequence),
            "grammar": ("a text", str),
        }
        rule, kind = rules[name]
        is_right = isinstance(value, kind)
        if name == "choice":
            is_right = is_right and not isinstance(value, str) and 0 < len(value) <= MAX_CHOICES
            is_right = is_right and all(isinstance(text, str) and text for text in value)
        if not is_right:
            raise ValueError(f"structured_outputs.{name} must be {rule}")
        size = len(self.key[1].encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"structured_outputs.{name} has {size} bytes, over the limit of {MAX_GRAMMAR_BYTES}")

    @property
    def key(self) -> tuple[str, str]:
        """The kind of constraint, and its text: equal where they ask for the same in the same words."""
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else _to_json(self.json)
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", _to_json(list(self.choice))
        assert self.grammar is not None
        return "grammar", self.grammar


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs cannot be written as JSON: {error}") from None
