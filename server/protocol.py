"""The requests of the HTTP API: OpenAI's fields, vLLM's extra ones, and how they become sampling parameters.

Types and shapes are checked here; the ranges of sampling values by ``SamplingParams``, whose errors begin
with the field's name.
"""

import dataclasses
import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from pagedjax import BeamSearchParams, SamplingParams, StructuredOutputsParams
from server.errors import ApiError, bad_request
from server.fields import EarlyStopping, LogitBias, Prompt, RequestBody, Salt, Stop, refuse
from server.tools import Message, NamedTool, Tool, ToolChoice

COMPLETION_MAX_TOKENS = 16

_SAMPLING_FIELDS = (
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("allowed_token_ids", "bad_words", "priority"),
)
# Beam search heeds these, or gives the same whatever they are, as with a seed.
_BEAM_FIELDS = {"n", "best_of", "temperature", "seed", "ignore_eos", "max_tokens"}
_ANY_OBJECT = StructuredOutputsParams(json_object=True)
_TEMPLATE_ARGUMENTS = {"self", "messages", "tools", "add_generation_prompt", "continue_final_message"}


class StreamOptions(RequestBody):
    """How to stream."""

    unsupported: ClassVar = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class JsonSchema(RequestBody):
    """A schema with its name. It is always kept to the letter, whatever ``strict`` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool = False


class ResponseFormat(RequestBody):
    """What the answer must look like, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_by_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise refuse("must be given when type is json_schema, and only then", "json_schema")
        return self


class StructuredOutputs(RequestBody):
    """What the answer must look like, in vLLM's words: see `StructuredOutputsParams`."""

    json_: str | dict[str, Any] | None = Field(alias="json", default=None)
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ModelRequest(RequestBody):
    """Any request: it names the model."""

    model: str


class SamplingRequest(ModelRequest):
    """What completions and chat have in common."""

    unsupported: ClassVar = {
        "store": (False,),
        "service_tier": ("auto", "default"),
    }

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Stop = Field(default_factory=list)
    logit_bias: LogitBias | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: Salt | None = None
    timeout: float | None = Field(default=None, gt=0)  # seconds

    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # These say who asks and why; they change nothing in the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("may only be given when stream is true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def blame(self, error: ValueError) -> ApiError | None:
        """A 400 for an error whose text begins with the name of a field; None if it does not."""
        [name] = re.findall(r"^\w*", str(error))
        rule = str(error)[len(name) :]
        param = self._param(name)
        if param not in type(self).model_fields:
            return None
        # A prompt that is too long is called a prompt, also where it came as messages.
        return bad_request(str(error) if name == "prompt" else f"{param}{rule}", param)

    def _param(self, name: str) -> str:
        """The field of this request that stands behind an argument of SamplingParams or of generate()."""
        if name == "beam_width":
            return "n" if self.best_of is None else "best_of"
        if name == "structured_outputs" and self.structured_outputs is None:
            return "response_format"
        return name

    def _params(self, **more: Any) -> SamplingParams | BeamSearchParams:
        if self.stream and self.best_of not in (None, self.n) and not self.use_beam_search:
            raise bad_request("best_of cannot be streamed unless it equals n", "best_of")
        fields = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        try:
            sampling = SamplingParams(**fields | more, structured_outputs=self._structured())
            return self._beam_params(sampling) if self.use_beam_search else self._without_beams(sampling)
        except ValueError as error:
            if refusal := self.blame(error):
                raise refusal from None
            raise

    def _structured(self) -> StructuredOutputsParams | None:
        asked, wanted = self.response_format, self.structured_outputs
        if asked is not None and asked.type == "text":
            asked = None
        if asked is not None and wanted is not None:
            raise bad_request("structured_outputs excludes response_format: give one of them", "structured_outputs")
        if wanted is not None:
            return StructuredOutputsParams(**wanted.model_dump(by_alias=True))
        if asked is None:
            return None
        return StructuredOutputsParams(json=asked.json_schema.schema_) if asked.json_schema else _ANY_OBJECT

    def _without_beams(self, sampling: SamplingParams) -> SamplingParams:
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise bad_request(f"{name} is for beam search: set use_beam_search, or leave it out", name)
        return sampling

    def _beam_params(self, sampling: SamplingParams) -> BeamSearchParams:
        """The search that a request asks for; what it would not heed is refused by name."""
        plain = SamplingParams()
        for name in (field.name for field in dataclasses.fields(sampling)):
            if name not in _BEAM_FIELDS and getattr(sampling, name) != getattr(plain, name):
                param = self._param(name) if name == "structured_outputs" else name
                raise bad_request(f"{param} does not go with use_beam_search: leave it out", param)
        if sampling.temperature not in (0, 1):
            message = f"temperature must be 0, 1 or absent with use_beam_search, got {sampling.temperature:g}"
            raise bad_request(message, "temperature")
        return BeamSearchParams(
            beam_width=sampling.num_samples,
            max_tokens=sampling.max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=sampling.ignore_eos,
        )


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    unsupported: ClassVar = {**SamplingRequest.unsupported, "suffix": ("",)}

    prompt: Prompt
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = COMPLETION_MAX_TOKENS
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or more."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def params(self) -> SamplingParams | BeamSearchParams:
        """How to sample, or to search.

        Raises:
            ApiError: 400, a value is out of its range, or two fields contradict each other.
        """
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return self._params(
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class TemplateFields(RequestBody):
    """How messages become a prompt."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False  # the template has them

    @field_validator("chat_template_kwargs")
    @classmethod
    def _keep_to_the_template(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := _TEMPLATE_ARGUMENTS & kwargs.keys():
            raise refuse(f"may not hold {min(taken)}")
        return kwargs

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise refuse("excludes add_generation_prompt: give one of them", "continue_final_message")
            self.add_generation_prompt = False
        return self


class ChatRequest(SamplingRequest, TemplateFields):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar = {
        **SamplingRequest.unsupported,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
    }

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _choice_of_a_tool(self) -> Self:
        if self.forced_tools is not None and not self.tools:
            raise refuse("needs tools", "tool_choice")
        if self.forced_tools == []:
            raise refuse("names a function that is not among the tools", "tool_choice")
        if self.forced_tools and (self.response_format or self.structured_outputs):
            raise refuse("excludes response_format and structured_outputs: give one of them", "tool_choice")
        if self.use_beam_search and self.tools:
            raise refuse("does not go with use_beam_search: leave it out", "tools")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool] | None:
        """The tools of which one has to be called; None where the model is free."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools if tool.function.name == name]
        return self.tools if self.tool_choice == "required" else None

    def _param(self, name: str) -> str:
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"prompt": "messages", "logprobs": "top_logprobs"}.get(name) or super()._param(name)

    def params(self) -> SamplingParams | BeamSearchParams:
        """How to sample, or to search; ``max_tokens`` None means what fits.

        Raises:
            ApiError: 400, a value is out of its range or two fields contradict each other.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs may only be given when logprobs is true", "top_logprobs")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise bad_request(
                "max_completion_tokens differs from max_tokens: give one of them", "max_completion_tokens"
            )
        max_tokens = given.pop() if given else None
        if max_tokens == 0:
            param = self._param("max_tokens")
            raise bad_request(f"{param} must be at least 1", param)
        return self._params(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class TokenizeTextRequest(ModelRequest):
    """``POST /tokenize`` with a text."""

    prompt: str
    add_special_tokens: bool = True


class TokenizeChatRequest(ModelRequest, TemplateFields):
    """``POST /tokenize`` with messages."""


class DetokenizeRequest(ModelRequest):
    """``POST /detokenize``."""

    tokens: list[int]
