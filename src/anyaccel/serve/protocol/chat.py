# SPDX-License-Identifier: Apache-2.0
"""OpenAI's shapes of conversations: `/v1/chat/completions`, and what `/tokenize` takes of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import GenerationFields, Logprobs, SamplingFields, Shape, Text, Usage


class ContentPart(Shape):
    """Text; other kinds are refused by name, and nothing that they point to is read."""

    type: str
    text: Text | None = None
    refusal: Text | None = None


class CalledFunction(Shape):
    name: str
    arguments: Text


class ToolCall(Shape):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Shape):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=limits.MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None


class Function(Shape):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    type: Literal["function"]
    function: Function


class FunctionName(Shape):
    name: str


class NamedTool(Shape):
    type: Literal["function"]
    function: FunctionName


class TemplateFields(Shape):
    """What vLLM's requests say of the model's chat template."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ConversationFields(GenerationFields, TemplateFields):
    """What becomes the prompt by the model's chat template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=limits.MOST_TOOLS)] | None = None


class ChatRequest(SamplingFields, ConversationFields):
    """`POST /v1/chat/completions`."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # OpenAI's former fields, which are refused: an answer without a call would be the wrong one.
    functions: list[Any] | None = None
    function_call: Any = None


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`, as vLLM has it: a text, or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MOST_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MOST_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


# What is answered -----------------------------------------------------------------------------------------


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[ContentLogprob]


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Shape):
    name: str | None = None
    arguments: str | None = None


class ToolDelta(Shape):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolDelta] | None = None


class ChatDelta(Shape):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class ChatChunk(Shape):
    """One `data:` of a stream; `data: [DONE]` ends it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None
