# SPDX-License-Identifier: Apache-2.0
"""Anthropic's `/v1/messages`: conversations with blocks of content."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import TokenUsage, generation_endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import Dialect, event, json_answer, read
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import (
    CalledFunction,
    ChatMessage,
    Function,
    FunctionName,
    GenerationFields,
    NamedTool,
    Shape,
    StopText,
    Text,
    ThinkingBudget,
    Tool,
    ToolCall,
)
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.requests.answers import MessageDelta, generate_messages
from anyaccel.serve.requests.conversation import Prompt, Thinking, build_prompt
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.structured import schema_grammar

Event = dict[str, Any]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# The bodies of the blocks that a stream begins with.
_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


_DIALECT = Dialect(
    error_body,
    lambda body: event(body, "error"),
    keep_alive=event({"type": "ping"}, "ping"),
    request_id="request-id",
    root="/v1/messages",
)


class Block(Shape):
    """A part of a message, according to `type`; other kinds are refused by name."""

    type: str
    text: Text | None = None
    thinking: Text | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Text | list[Block] | None = None
    source: dict[str, Any] | None = None


class InputMessage(Shape):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=limits.MOST_MESSAGES)]


class InputTool(Shape):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]
    type: str | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Shape):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(Shape):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingBudget | None = None


class OutputFormat(Shape):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool = Field(alias="schema")


class OutputOptions(Shape):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(GenerationFields):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=limits.MOST_MESSAGES)]
    system: Text | list[Block] | None = None
    tools: Annotated[list[InputTool], Field(max_length=limits.MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputOptions | None = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stop_sequences: Annotated[list[StopText], Field(max_length=limits.MOST_STOPS)] | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [each for each in self.stop_sequences or () if each]


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def count(request: Request) -> Response:
        body = await read(request, CountRequest, models.limits)
        frontend = await models.serving(request, body.model)
        prompt = await _prompt(frontend, body)
        return json_answer({"input_tokens": len(prompt.tokens)})

    summary = "The next message of a conversation, as Anthropic's API has it"
    return [
        generation_endpoint(models, "/v1/messages", summary, MessagesRequest, prepare, _DIALECT),
        Endpoint("/v1/messages/count_tokens", "Tokens of a conversation", count, CountRequest, dialect=_DIALECT),
    ]


async def prepare(frontend: Frontend, request: MessagesRequest, key: str) -> MessagesGeneration:
    """Check a request, and make its prompt.

    Raises:
        ApiError: it cannot be answered.
    """
    prompt = await _prompt(frontend, request)
    room = frontend.answer_room(prompt.tokens, None, "max_tokens", "messages") if frontend.engine.facts.context else 0
    # Anthropic's clients ask for as much as Claude can write, whatever the conversation needs.
    max_tokens = min(request.max_tokens, room) if room else request.max_tokens
    return MessagesGeneration(frontend, request, prompt, max_tokens, key)


async def _prompt(frontend: Frontend, request: CountRequest) -> Prompt:
    choice = request.tool_choice or ToolChoice(type="auto")
    wanted: str | NamedTool | None = {"any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise wrong("tool_choice.name", "is required")
        wanted = NamedTool(type="function", function=FunctionName(name=choice.name))
    output = request.output_config or OutputOptions()
    messages = [*_messages(request)]
    is_prefilled = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return await build_prompt(
        frontend,
        messages,
        _tools(request),
        wanted,
        False if choice.disable_parallel_tool_use else None,
        schema_grammar(output.format.json_schema, "output_config.format.schema") if output.format else None,
        _thinking(frontend, request.thinking, output.effort),
        None,
        "continue" if is_prefilled else "answer",
    )


def _thinking(frontend: Frontend, option: ThinkingOption | None, effort: str | None) -> Thinking:
    """What the request says about thoughts; a budget that the model cannot reach or hold is no bound."""
    effort = {"max": "high"}.get(effort or "", effort)
    if option is None or option.type == "disabled":
        return Thinking(effort if option is None else "none")
    context, thoughts = frontend.engine.facts.context, frontend.reasoning
    can_hold = thoughts is not None and frontend.tokenizer.token_id(thoughts.end[0]) is not None
    can_hold = can_hold and thoughts is not None and frontend.tokenizer.token_id(thoughts.begin[0]) is not None
    budget = option.budget_tokens if can_hold and (option.budget_tokens or 0) < (context or 1 << 31) else None
    return Thinking(effort or "medium", budget)


def _tools(request: CountRequest) -> list[Tool]:
    tools = []
    for place, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise wrong(f"tools[{place}]", f"{tool.name}: only tools with an input_schema are supported, which you run")
        function = Function.model_construct(
            name=tool.name, description=tool.description, parameters=tool.input_schema or None
        )
        tools.append(Tool.model_construct(type="function", function=function))
    return tools


# Conversations --------------------------------------------------------------------------------------------


def _messages(request: CountRequest) -> Iterator[ChatMessage]:
    """The conversation as OpenAI's messages; messages of one role after another are one."""
    made: list[ChatMessage] = []
    if request.system:
        made.append(ChatMessage(role="system", content=_texts(request.system, "system")))
    for place, message in enumerate(request.messages):
        where = f"messages[{place}].content"
        blocks = [Block(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            made.append(_assistant_message(blocks, where))
            continue
        texts: list[str] = []
        for number, block in enumerate(blocks):
            if block.type == "tool_result":
                content = _texts(block.content or "", f"{where}[{number}].content")
                made.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
            else:
                texts.append(_text(block, f"{where}[{number}]"))
        if texts:
            made.append(ChatMessage(role=message.role, content="\n".join(texts)))
    before: ChatMessage | None = None
    for each in made:
        if before is not None and before.role == each.role and each.role != "tool":
            before = before.model_copy(
                update={
                    "content": "\n\n".join(filter(None, (str(before.content or ""), str(each.content or "")))),
                    "tool_calls": [*(before.tool_calls or ()), *(each.tool_calls or ())] or None,
                    "reasoning_content": each.reasoning_content or before.reasoning_content,
                }
            )
            continue
        if before is not None:
            yield before
        before = each
    if before is None:
        raise wrong("messages", "has no content")
    yield before


def _assistant_message(blocks: Sequence[Block], where: str) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.name:
                raise wrong(f"{where}[{number}].name", "is required")
            function = CalledFunction(name=block.name, arguments=json.dumps(block.input or {}, ensure_ascii=False))
            calls.append(ToolCall(id=block.id, type="function", function=function))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":  # which only Anthropic can read
            texts.append(_text(block, f"{where}[{number}]"))
    content = "\n".join(texts) if texts or not calls else None
    return ChatMessage(
        role="assistant", content=content, tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None
    )


def _texts(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{where}[{number}]") for number, block in enumerate(content))


def _text(block: Block, where: str) -> str:
    """The text of a block.

    Raises:
        ApiError: it has none.
    """
    if block.type == "document" and (block.source or {}).get("type") == "text":
        return str((block.source or {}).get("data", ""))
    if block.type != "text":
        raise wrong(where, f"a block of type {block.type[:40]!r} is not supported here: the model reads text")
    if block.text is None:
        raise wrong(f"{where}.text", "is required")
    return block.text


# Answers --------------------------------------------------------------------------------------------------


@dataclass
class MessagesGeneration:
    """Answers one request that has been checked; see `PreparedRequest`.

    The events of its stream also build the response.
    """

    frontend: Frontend
    request: MessagesRequest
    prompt: Prompt
    max_tokens: int
    key: str

    def __post_init__(self) -> None:
        self.usage = TokenUsage([len(self.prompt.tokens)])
        self._content: list[dict[str, Any]] = []
        self._arguments = ""  # of the open call
        self._is_open = False
        self._stop: tuple[str | None, str | None] = (None, None)
        self._identity = new_id("msg_")

    def _message(self) -> dict[str, Any]:
        reason, sequence = self._stop
        return {
            "id": self._identity,
            "type": "message",
            "role": "assistant",
            "model": self.request.model or self.frontend.model,
            "content": [dict(block) for block in self._content],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self.usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.completion_tokens,
        }

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._content.append(dict(block))
        self._is_open = True
        index = len(self._content) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": block}]

    def _delta(self, **delta: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self._content[-1]
        events = []
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        if block["type"] == "thinking":
            events.append(self._delta(type="signature_delta", signature=""))
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]

    def _append(self, kind: str, text: str) -> list[Event]:
        """Append to a block of thoughts or text, opening a new one if another is open."""
        events = []
        if not self._is_open or self._content[-1]["type"] != kind:
            events = self._begin(dict(_EMPTY[kind]))
        self._content[-1][kind] += text
        return [*events, self._delta(type=f"{kind}_delta", **{kind: text})]

    def _append_call(self, part: dict[str, Any]) -> list[Event]:
        events = []
        function = part["function"]
        if "id" in part:
            events = self._begin({"type": "tool_use", "id": part["id"], "name": function["name"], "input": {}})
            self._arguments = ""
        self._arguments += function["arguments"]
        return [*events, self._delta(type="input_json_delta", partial_json=function["arguments"])]

    def _parse(self, delta: MessageDelta) -> list[Event]:
        events = []
        if delta.reasoning:
            events += self._append("thinking", delta.reasoning)
        if delta.content:
            events += self._append("text", delta.content)
        for part in delta.calls:
            events += self._append_call(part)
        if delta.finish is not None:
            events += self._close()
            stopped = delta.finish == "stop" and bool(delta.text.stop)
            self._stop = ("stop_sequence", delta.text.stop) if stopped else (_STOPS[delta.finish], None)
        return events

    async def _events(self) -> AsyncGenerator[Event, None]:
        deltas = generate_messages(self.frontend, self.request, self.prompt, self.max_tokens, key=self.key)
        started = False
        async with aclosing(deltas):
            async for delta in deltas:
                self.usage.add_message(delta)
                if not started:
                    started = True
                    yield {"type": "message_start", "message": self._message()}
                for each in self._parse(delta):
                    yield each
        reason, sequence = self._stop
        change = {"stop_reason": reason, "stop_sequence": sequence}
        yield {"type": "message_delta", "delta": change, "usage": self._usage()}
        yield {"type": "message_stop"}

    async def response(self) -> dict[str, Any]:
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._message()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events()) as events:
            async for each in events:
                yield event(each, each["type"])


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; {} where max_tokens has cut them."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
