# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/responses`: conversations with output items and named events; answers are kept for a while."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from anyaccel.errors import AnyAccelError
from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import TokenUsage, generation_endpoint
from anyaccel.serve.api.models import Models
from anyaccel.serve.api.sending import Dialect, event, json_answer, to_json
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import (
    AllowedTools,
    CalledFunction,
    ChatMessage,
    ContentPart,
    Function,
    FunctionName,
    GenerationFields,
    Logprobs,
    MaxTokens,
    NamedTool,
    ReasoningEffort,
    ResponseFormat,
    Shape,
    Text,
    Tool,
    ToolCall,
)
from anyaccel.serve.protocol.errors import ApiError, api_error, wrong
from anyaccel.serve.requests.answers import MessageDelta, generate_messages
from anyaccel.serve.requests.conversation import Prompt, Thinking, build_prompt, content_text
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.stored import AnswerStore, StoredAnswer
from anyaccel.serve.requests.structured import response_format_grammar

Event = dict[str, Any]
_DIALECT = Dialect(ApiError.body, event)


class InputItem(Shape):
    """A message, a call, or its result, according to `type`; a message may leave it out."""

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


class AllowedFunctions(Shape):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=limits.MOST_TOOLS)]


class TextFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Shape):
    format: TextFormat | None = None


class Reasoning(Shape):
    effort: ReasoningEffort | None = None


class ResponsesRequest(GenerationFields):
    """`POST /v1/responses`."""

    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=limits.MOST_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=limits.MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # true by default, as with OpenAI
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    top_logprobs: Logprobs | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""

    async def stored(request: Request) -> Response:
        found = _find(models.answers, request.scope["anyaccel.key"], request.path_params["response"])
        return json_answer(found.response)

    async def delete(request: Request) -> Response:
        identity = request.path_params["response"]
        _find(models.answers, request.scope["anyaccel.key"], identity)
        models.answers.remove(request.scope["anyaccel.key"], identity)
        return json_answer({"id": identity, "object": "response", "deleted": True})

    summary = "The next message of a conversation, as items"
    path = "/v1/responses/{response}"
    return [
        generation_endpoint(models, "/v1/responses", summary, ResponsesRequest, prepare, _DIALECT),
        Endpoint(path, "An answer that is still kept", stored),
        Endpoint(path, "Forget an answer", delete, verb="DELETE"),
    ]


def _find(answers: AnswerStore, key: str, identity: str, param: str | None = None) -> StoredAnswer:
    """An answer that is kept for this client.

    Raises:
        ApiError: there is none of this id.
    """
    found = answers.get(key, identity)
    if found is None:
        text = f"no answer {identity[:100]!r} is kept here (any more): send the conversation in input"
        if param:  # OpenAI's code
            raise wrong(param, text, "previous_response_not_found")
        raise ApiError(404, text, None, "response_not_found", "not_found_error")
    return found


async def prepare(frontend: Frontend, request: ResponsesRequest, key: str) -> ResponsesGeneration:
    """Check a request, and make its prompt.

    Raises:
        ApiError: it cannot be answered.
    """
    if request.conversation is not None:
        raise wrong("conversation", "is not supported: send previous_response_id, or the conversation in input")
    if request.background:
        raise wrong("background", "is not supported")
    earlier: Sequence[ChatMessage] = ()
    if request.previous_response_id is not None:
        earlier = _find(frontend.answers, key, request.previous_response_id, "previous_response_id").messages
    messages = _messages(request, earlier)
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        raise wrong("top_logprobs", "is not supported here; /v1/chat/completions has them")
    form = request.text.format if request.text else None
    wanted = None
    if form is not None:
        # The schema is a field of `text.format`, as it may be of `response_format` beside json_object.
        if form.type == "json_schema" and form.json_schema is None:
            raise wrong("text.format.schema", "is required in a format of type json_schema")
        wanted = None if form.type == "text" else ResponseFormat(type="json_object", schema=form.json_schema)
    given = request.tool_choice
    choice: str | NamedTool | AllowedTools | None
    if isinstance(given, NamedFunction):
        choice = _named_tool(given)
    elif isinstance(given, AllowedFunctions):
        choice = AllowedTools(mode=given.mode, tools=[_named_tool(each) for each in given.tools])
    else:
        choice = given
    prompt = await build_prompt(
        frontend,
        messages,
        _tools(request),
        choice,
        request.parallel_tool_calls,
        response_format_grammar(wanted, "text.format"),
        Thinking(request.reasoning.effort if request.reasoning else None),
        request.chat_template_kwargs,
    )
    max_tokens = frontend.answer_room(prompt.tokens, request.max_output_tokens, "max_output_tokens", "input")
    # Instructions are not kept, as with OpenAI.
    kept = messages[1:] if request.instructions else messages
    return ResponsesGeneration(frontend, request, prompt, max_tokens, key, kept)


def _named_tool(function: NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=function.name))


def _messages(request: ResponsesRequest, earlier: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The earlier conversation and the input as messages."""
    messages = [*earlier]
    if request.instructions:
        messages.insert(0, ChatMessage(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, ChatMessage(role="user", content=request.input)]
    for place, item in enumerate(request.input):
        message = _message(item, f"input[{place}]")
        before = messages[-1] if messages else None
        if message is None:
            continue
        if message.tool_calls and before is not None and before.role == "assistant":  # calls of one answer
            messages[-1] = before.model_copy(update={"tool_calls": [*(before.tool_calls or ()), *message.tool_calls]})
        else:
            messages.append(message)
    if not messages:
        raise wrong("input", "has no message")
    return messages


def _message(item: InputItem, where: str) -> ChatMessage | None:
    if item.type in (None, "message"):
        if item.role is None:
            raise wrong(f"{where}.role", "is required")
        return ChatMessage(role=item.role, content=content_text(item.content, f"{where}.content"))
    if item.type == "function_call":
        if not item.name or item.call_id is None:
            raise wrong(f"{where}.name", "a call needs name and call_id")
        function = CalledFunction(name=item.name, arguments=item.arguments or "{}")
        return ChatMessage(role="assistant", tool_calls=[ToolCall(id=item.call_id, type="function", function=function)])
    if item.type == "function_call_output":
        return ChatMessage(role="tool", content=content_text(item.output, f"{where}.output"), tool_call_id=item.call_id)
    if item.type == "reasoning":  # the reasoning of earlier answers is not given to the model again
        return None
    raise wrong(f"{where}.type", f"{item.type[:40]!r} is not supported: this model reads text and calls of functions")


def _tools(request: ResponsesRequest) -> list[Tool]:
    tools = []
    for place, tool in enumerate(request.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise wrong(f"tools[{place}]", "only tools of type function, with a name, are supported")
        function = Function(name=tool.name, description=tool.description, parameters=tool.parameters)
        tools.append(Tool(type="function", function=function))
    return tools


@dataclass
class ResponsesGeneration:
    """Answers one request that has been checked; see `PreparedRequest`.

    The events of its stream also build the response.
    """

    frontend: Frontend
    request: ResponsesRequest
    prompt: Prompt
    max_tokens: int
    key: str
    messages: Sequence[ChatMessage]

    def __post_init__(self) -> None:
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the output item that still grows
        self.usage = TokenUsage([len(self.prompt.tokens)])
        self._reported: dict[str, Any] | None = None  # the usage, once the answer is complete
        self._status, self._why = "in_progress", ""
        self._identity, self._created = new_id("resp_"), int(time.time())

    def _response(self) -> dict[str, Any]:
        request = self.request
        return {
            "id": self._identity,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": self._why} if self._why else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model or self.frontend.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": self.frontend.defaults.temperature if request.temperature is None else request.temperature,
            "text": {"format": {"type": request.text.format.type if request.text and request.text.format else "text"}},
            "tool_choice": request.tool_choice.model_dump()
            if isinstance(request.tool_choice, NamedFunction | AllowedFunctions)
            else request.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in request.tools or ()],
            "top_p": self.frontend.defaults.top_p if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._reported,
        }

    # Items -------------------------------------------------------------------------------------------------

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        """Close the open item, and open another one."""
        events = self._close()
        self._open = item
        self._output.append(item)
        added = {**item, "content": []} if "content" in item else dict(item)
        events.append({"type": "response.output_item.added", "output_index": self._index, "item": added})
        if "content" in item:
            events.append(self._part_event("response.content_part.added", part={**item["content"][0], "text": ""}))
        return events

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _part_event(self, kind: str, **more: Any) -> Event:
        item = self._output[-1]
        part = {"content_index": 0} if "content" in item else {}
        return {"type": kind, "item_id": item["id"], "output_index": self._index, **part, **more}

    def _close(self, status: str = "completed") -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            events = [self._part_event("response.function_call_arguments.done", arguments=item["arguments"])]
        else:
            part = item["content"][0]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more: dict[str, Any] = {} if kind == "reasoning_text" else {"logprobs": []}
            events = [
                self._part_event(f"response.{kind}.done", text=part["text"], **more),
                self._part_event("response.content_part.done", part=dict(part)),
            ]
        return [*events, {"type": "response.output_item.done", "output_index": self._index, "item": dict(item)}]

    def _append(self, kind: str, text: str) -> list[Event]:
        """Append text to the message or to the reasoning, opening a new item if another one is open."""
        events = []
        if self._open is None or self._open["type"] != kind:
            if kind == "reasoning":
                parts = [{"type": "reasoning_text", "text": ""}]
                item = {"id": new_id("rs_"), "type": kind, "status": "in_progress", "summary": [], "content": parts}
            else:
                parts = [{"type": "output_text", "text": "", "annotations": []}]  # type: ignore[dict-item]
                item = {
                    "id": new_id("msg_"),
                    "type": kind,
                    "status": "in_progress",
                    "role": "assistant",
                    "content": parts,
                }
            events = self._begin(item)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        if kind == "reasoning":
            return [*events, self._part_event("response.reasoning_text.delta", delta=text)]
        return [*events, self._part_event("response.output_text.delta", delta=text, logprobs=[])]

    def _append_call(self, part: dict[str, Any]) -> list[Event]:
        events = []
        if "id" in part:
            item = {"id": new_id("fc_"), "type": "function_call", "status": "in_progress", "call_id": part["id"]}
            events = self._begin({**item, "name": part["function"]["name"], "arguments": ""})
        assert self._open is not None
        arguments = part["function"]["arguments"]
        self._open["arguments"] += arguments
        return [*events, self._part_event("response.function_call_arguments.delta", delta=arguments)]

    def _parse(self, delta: MessageDelta) -> list[Event]:
        events = []
        if delta.reasoning:
            events += self._append("reasoning", delta.reasoning)
        if delta.content:
            events += self._append("message", delta.content)
        for part in delta.calls:
            events += self._append_call(part)
        if delta.finish is not None:
            if not self._output:
                events += self._append("message", "")
            cut = delta.finish == "length"
            self._status = "incomplete" if cut else "completed"
            self._why = "max_output_tokens" if cut else ""
            events += self._close(self._status)
        return events

    # Answers -----------------------------------------------------------------------------------------------

    async def _events(self) -> AsyncGenerator[Event, None]:
        yield {"type": "response.created", "response": self._response()}
        yield {"type": "response.in_progress", "response": self._response()}
        deltas = generate_messages(self.frontend, self.request, self.prompt, self.max_tokens, key=self.key)
        async with aclosing(deltas):
            async for delta in deltas:
                self.usage.add_message(delta)
                for each in self._parse(delta):
                    yield each
        usage = self.usage
        self._reported = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        response = self._response()
        if self.request.store is not False:
            self._keep(response)
        yield {"type": f"response.{self._status}", "response": response}

    def _keep(self, response: dict[str, Any]) -> None:
        """Keep the answer, and the conversation up to it."""
        texts = dict.fromkeys(("message", "reasoning"), "")
        calls = []
        for item in self._output:
            if item["type"] == "function_call":
                function = CalledFunction(name=item["name"], arguments=item["arguments"])
                calls.append(ToolCall(id=item["call_id"], type="function", function=function))
            else:
                texts[item["type"]] += item["content"][0]["text"]
        message = ChatMessage(
            role="assistant",
            content=texts["message"] if texts["message"] or not calls else None,
            tool_calls=calls or None,
            reasoning_content=texts["reasoning"] or None,
        )
        messages = [*self.messages, message]
        size = len(to_json(response)) + sum(len(each.model_dump_json(exclude_none=True)) for each in messages)
        self.frontend.answers.put(self.key, self._identity, StoredAnswer(response, messages, size))

    async def response(self) -> dict[str, Any]:
        async with aclosing(self._events()) as events:
            async for _ in events:
                pass
        return self._response()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        waiting: list[bytes] = []  # held back until the first token, so that an error before it gets an HTTP status
        number = 0
        try:
            async with aclosing(self._events()) as events:
                async for each in events:
                    waiting.append(event({**each, "sequence_number": number}, each["type"]))
                    number += 1
                    if number > 2:
                        yield b"".join(waiting)
                        waiting.clear()
        except (AnyAccelError, ApiError) as error:
            if number <= 2:
                raise
            reported = api_error(error)
            self._status = "failed"
            failed = {
                **self._response(),
                "error": {"code": reported.code or "server_error", "message": reported.message},
            }
            yield event({"type": "response.failed", "response": failed, "sequence_number": number}, "response.failed")
