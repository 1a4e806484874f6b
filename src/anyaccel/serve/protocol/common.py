# SPDX-License-Identifier: Apache-2.0
"""The shapes that requests of several APIs share: how to generate, and conversations.

pydantic checks them, and the OpenAPI document is made of them. A field that is not here is ignored, since clients send
those of many servers; one that is wrong is an error that names it. Defaults are OpenAI's; vLLM's extensions have
vLLM's names.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from anyaccel.serve.protocol import limits

CUSTOM_INPUT = "input"  # the argument that stands for the text of a custom tool

T = TypeVar("T")
Text = Annotated[str, Field(max_length=8 << 20)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopText = Annotated[str, Field(max_length=limits.MOST_STOP_LENGTH)]  # "" is none
MaxTokens = Annotated[int, Field(ge=-1, lt=1 << 31)]  # -1: as many as the context leaves
Logprobs = Annotated[int, Field(ge=0, le=limits.MOST_LOGPROBS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Shape(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Shape):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Shape):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: dict[str, Any] | bool | None = Field(None, alias="schema")  # llama.cpp's, beside json_object


Regex = Annotated[str, Field(min_length=1, max_length=limits.MOST_REGEX)]
Lark = Annotated[str, Field(min_length=1, max_length=limits.MOST_GRAMMAR)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=limits.MOST_STOP_LENGTH)]],
    Field(min_length=1, max_length=limits.MOST_CHOICES),
]


class StructuredOutputs(Shape):
    """vLLM's `structured_outputs`: one of the fields is set."""

    json_value: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Lark | None = None


class GenerationFields(Shape):
    """What all requests that generate text have."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MOST_STOPS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Ours: seconds until the answer has to be complete.
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None

    @property
    def answer_count(self) -> int:
        """How many answers to each prompt are wanted."""
        return 1

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end an answer."""
        return []

    @property
    def keep_s(self) -> float | None:
        """Seconds that the model stays in memory after this request; None: as the server has it."""
        return None


class SamplingFields(GenerationFields):
    """What OpenAI's chat and plain completions add."""

    n: Annotated[int, Field(ge=1, le=limits.MOST_ANSWERS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=limits.MOST_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=limits.MOST_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Lark | None = None
    # llama.cpp's
    grammar: Lark | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    dry_sequence_breakers: Annotated[list[StopText], Field(max_length=limits.MOST_STOPS)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def answer_count(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return [each for each in given if each]


# Conversations --------------------------------------------------------------------------------------------


class ContentPart(Shape):
    """Text; other kinds are refused by name, and nothing that they refer to is read."""

    type: str
    text: Text | None = None
    refusal: Text | None = None


class _Custom(Shape, Generic[T]):
    """What OpenAI has under `custom`."""

    custom: T


class CalledFunction(Shape):
    name: str
    arguments: Text


class CalledCustom(Shape):
    """A call of a custom tool: its input is a text."""

    name: str
    input: Text


class ToolCall(Shape):
    """A call; one of a custom tool is read as that of a function with the one argument `input`."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _from_custom(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "custom":
            return given
        called = _Custom[CalledCustom].model_validate(given).custom
        arguments = json.dumps({CUSTOM_INPUT: called.input}, ensure_ascii=False)
        return {**given, "function": {"name": called.name, "arguments": arguments}}


class ChatMessage(Shape):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # vLLM's and OpenRouter's name of the same


FunctionNameText = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class Function(Shape):
    name: FunctionNameText
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(Shape):
    definition: Annotated[str, Field(max_length=limits.MOST_SCHEMA)]
    syntax: Literal["lark", "regex"]


class CustomFormat(Shape):
    type: Literal["text", "grammar"]
    grammar: Annotated[CustomGrammar | None, Field(validate_default=True)] = None

    @field_validator("grammar")
    @classmethod
    def _is_there(cls, given: CustomGrammar | None, fields: ValidationInfo) -> CustomGrammar | None:
        if given is None and fields.data.get("type") == "grammar":  # a text would be held to nothing
            raise PydanticCustomError("missing", "is required")
        return given


class CustomTool(Shape):
    """A tool whose input is a text, of a grammar if it has one."""

    name: FunctionNameText
    description: Text | None = None
    format: CustomFormat | None = None


class Tool(Shape):
    """A tool; a custom one is offered to the model as a function with the one argument `input`."""

    type: Literal["function", "custom"]
    function: Function
    custom: CustomTool | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_custom(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "custom":
            return given
        custom = _Custom[CustomTool].model_validate(given).custom
        grammar = custom.format.grammar if custom.format is not None and custom.format.type == "grammar" else None
        schema: dict[str, Any] = {"type": "string"}
        description = custom.description or ""
        if grammar is not None:
            description += f"\n\nThe input has to fit this grammar ({grammar.syntax}):\n{grammar.definition}"
            if grammar.syntax == "regex":
                schema["pattern"] = f"^(?:{grammar.definition})$"
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: schema}, "required": [CUSTOM_INPUT]}
        function = {"name": custom.name, "description": description.strip(), "parameters": parameters}
        return {**given, "function": function}


class FunctionName(Shape):
    name: str


class NamedTool(Shape):
    type: Literal["function", "custom"]
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _from_custom(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "custom":
            return given
        return {**given, "function": {"name": _Custom[FunctionName].model_validate(given).custom.name}}


class AllowedTools(Shape):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=limits.MOST_TOOLS)]


class AllowedToolsChoice(Shape):
    """OpenAI's choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
ThinkingBudget = Annotated[int, Field(ge=0, lt=1 << 31)]


class TemplateFields(Shape):
    """vLLM's fields about the model's chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MOST_MESSAGES)]
Tools = Annotated[list[Tool], Field(max_length=limits.MOST_TOOLS)]


# Errors ---------------------------------------------------------------------------------------------------


class ErrorBody(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Shape):
    """The body of every response to a request that has failed."""

    error: ErrorBody
