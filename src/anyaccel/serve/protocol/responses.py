# SPDX-License-Identifier: Apache-2.0
"""OpenAI's shapes of `/v1/responses`, as far as they are text, thoughts and functions; nothing is kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.chat import ContentPart
from anyaccel.serve.protocol.common import GenerationFields, Logprobs, Shape, Text


class InputItem(Shape):
    """A message, a call, or its result: which, `type` says; a message may leave it out."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Text | None = None
    output: Text | list[ContentPart] | None = None


class ResponseTool(Shape):
    type: str
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")] | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Shape):
    type: Literal["function"]
    name: str


class TextFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Shape):
    format: TextFormat | None = None


class ResponsesRequest(GenerationFields):
    """`POST /v1/responses`."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=limits.MOST_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=limits.MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    top_logprobs: Logprobs | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesUsage(Shape):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class ResponsesAnswer(Shape):
    """The answer; a stream tells it in its first and its last event."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage | None
    incomplete_details: dict[str, str] | None
