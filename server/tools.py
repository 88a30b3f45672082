"""Tools in a chat request: the functions that a model may call, and the calls and results of earlier turns."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from server.fields import Content, RequestBody, Role, refuse

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(RequestBody):
    """A function that the model may call; ``parameters`` is a JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(RequestBody):
    """A tool: a function is the only kind there is."""

    type: Literal["function"]
    function: Function


class CalledFunction(RequestBody):
    """A call as the model made it: the arguments are the text of a JSON object."""

    name: str
    arguments: str = "{}"

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise refuse("must be the text of a JSON object")
        return text


class CalledTool(RequestBody):
    """A call in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: the arguments as an object."""
        arguments = json.loads(self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class NamedFunction(RequestBody):
    """The function that has to be called."""

    name: str


class NamedTool(RequestBody):
    """The tool that has to be used."""

    type: Literal["function"]
    function: NamedFunction


def _check_choice(value: object) -> object:
    if isinstance(value, dict) or value in ("none", "auto", "required"):
        return value
    raise refuse('must be "none", "auto", "required" or a function: {"type": "function", "function": {"name": ...}}')


ToolChoice = Annotated[str | NamedTool, BeforeValidator(_check_choice)]


class Message(RequestBody):
    """One message of a conversation."""

    unsupported: ClassVar = {"annotations": ([],), "function_call": (), "refusal": (), "audio": ()}

    role: Role
    content: Content | None = None
    name: str | None = None
    tool_calls: list[CalledTool] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise refuse("is required", "content")
        if self.tool_calls and self.role != "assistant":
            raise refuse("is for messages of the assistant", "tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise refuse("must be given where role is tool, and only there", "tool_call_id")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text parts joined by newlines, developer as system."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in more.items() if value is not None}
