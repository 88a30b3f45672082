"""Types of request fields: what each may hold, and the one clear line when it holds something else."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from server.errors import ApiError, bad_request

MAX_PROMPTS = 1024  # in one request
MAX_SALT = 256  # characters

OWN_ERROR = "pagedjax"  # type of the errors made here, whose text goes on from the field's name


class RequestBody(BaseModel):
    """A JSON object where null means the default, types are not bent, and unknown fields are refused.

    ``unsupported`` lists known fields that are not supported, with the values that change nothing and so are
    accepted.
    """

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        for name in given.keys() & cls.unsupported.keys():
            value = given.pop(name)
            if not any(value == n and type(value) is type(n) for n in cls.unsupported[name]):
                raise refuse("is not supported: leave it out", name)
        return given


def refuse(rule: str, field: str | None = None) -> PydanticCustomError:
    """An error that reads ``<field> <rule>``; a validator of a whole object says which field it is about."""
    return PydanticCustomError(OWN_ERROR, "{rule}", {"rule": rule, "field": field})


def field_error(error: ValidationError) -> ApiError:
    """The first thing wrong in a request, as a 400 that names its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = first.get("ctx", {}).get("field") if first["type"] == OWN_ERROR else None
    param = _path((*first["loc"], field) if field else first["loc"])
    match first["type"]:
        case "extra_forbidden":
            message = f"{param} is not a field of this request: leave it out"
            return bad_request(message, param, code="unknown_field")
        case "missing":
            return bad_request(f"{param} is required", param, code="missing_field")
        case kind if kind == OWN_ERROR:
            return bad_request(f"{param} {first['msg']}", param)
        case _:
            return bad_request(f"{param}: {first['msg']}", param)


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _check_stop(value: object) -> object:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        return value
    raise refuse("must be a string or a list of strings")


def _check_prompt(value: object) -> object:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if _is_ids(value):
            return value
        if len(value) > MAX_PROMPTS:
            raise refuse(f"must be at most {MAX_PROMPTS} prompts, got {len(value)}")
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and _is_ids(item) for item in value):
            return value
    raise refuse("must be a string, a list of strings, a list of token ids or a list of such lists, and not empty")


def _check_early_stopping(value: object) -> object:
    if isinstance(value, bool) or value == "never":
        return value
    raise refuse('must be true, false or "never"')


def _is_ids(value: list[object]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


def _check_logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise refuse("must be an object of token ids and numbers")
    bias: dict[int, object] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20):
            raise refuse(f"must be keyed by token ids, got {key!r:.40}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise refuse("must be an object of token ids and numbers")
        bias[int(key)] = number
    return bias


def _check_content(value: object) -> object:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refuse("must be a string or a list of text parts, and not empty")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise refuse("must be a list of objects with a type")
        if kind != "text":
            raise refuse(f"holds a part of type {kind!r:.40}: only text is supported")
        if not isinstance(part.get("text"), str):
            raise refuse("holds a text part without text")
        if unknown := set(part) - {"type", "text"}:
            raise refuse(f"holds a part with {min(unknown)!r:.40}, which is not supported: leave it out")
    return value


def _check_role(value: object) -> object:
    if value == "function":
        raise refuse("function is not supported: use tool")
    if value not in ("system", "developer", "user", "assistant", "tool"):
        raise refuse("must be system, developer, user, assistant or tool")
    return value


class TextPart(RequestBody):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
EarlyStopping = Annotated[bool | Literal["never"], BeforeValidator(_check_early_stopping)]
Stop = Annotated[str | list[str], BeforeValidator(_check_stop)]
Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_check_prompt)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_check_logit_bias)]
Content = Annotated[str | list[TextPart], BeforeValidator(_check_content)]
Role = Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_check_role)]
