# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/chat/completions`: a conversation's next message, at once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from anyaccel.serve.api.endpoint import Endpoint
from anyaccel.serve.api.generation import (
    TokenUsage,
    answer_head,
    check_stream_options,
    choice_events,
    generation_endpoint,
)
from anyaccel.serve.api.models import Models
from anyaccel.serve.interface import TokenLogprob
from anyaccel.serve.protocol.common import (
    AllowedToolsChoice,
    Logprobs,
    MaxTokens,
    Messages,
    NamedTool,
    ReasoningEffort,
    SamplingFields,
    TemplateFields,
    ThinkingBudget,
    Tools,
)
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.answers import MessageDelta, generate_messages
from anyaccel.serve.requests.conversation import Prompt, Thinking, build_prompt, prompt_ending
from anyaccel.serve.requests.frontend import Frontend
from anyaccel.serve.requests.structured import request_grammar
from anyaccel.serve.requests.tokenizer import ServerTokenizer

REASONING_NAMES = ("reasoning_content", "reasoning")  # DeepSeek's name, and the one of vLLM and OpenRouter


class ChatRequest(SamplingFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: Tools | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: ThinkingBudget | None = None  # vLLM's
    # OpenAI's former fields, which are refused: an answer without a call would be the wrong one.
    functions: list[Any] | None = None
    function_call: Any = None


def endpoints(models: Models) -> list[Endpoint]:
    """The endpoints of this API."""
    summary = "The next message of a conversation"
    return [generation_endpoint(models, "/v1/chat/completions", summary, ChatRequest, prepare)]


async def prepare(frontend: Frontend, request: ChatRequest, key: str) -> ChatGeneration:
    """Check a request, and make its prompt.

    Raises:
        ApiError: it cannot be answered.
    """
    for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, name) is not None:
            raise wrong(name, f"is not supported: OpenAI has replaced it by {newer}")
    if request.top_logprobs and not request.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    check_stream_options(request)
    choice = request.tool_choice
    prompt = await build_prompt(
        frontend,
        request.messages,
        request.tools,
        choice.allowed_tools if isinstance(choice, AllowedToolsChoice) else choice,
        request.parallel_tool_calls,
        request_grammar(request),
        Thinking(request.reasoning_effort, request.thinking_token_budget),
        request.chat_template_kwargs,
        prompt_ending(request),
    )
    customs = frozenset(tool.function.name for tool in request.tools or () if tool.custom is not None)
    prompt = replace(prompt, customs=customs)
    param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = frontend.answer_room(prompt.tokens, getattr(request, param), param, "messages")
    return ChatGeneration(frontend, request, prompt, max_tokens, key)


@dataclass
class ChatGeneration:
    """Answers one request that has been checked; see `PreparedRequest`."""

    frontend: Frontend
    request: ChatRequest
    prompt: Prompt
    max_tokens: int
    key: str

    def __post_init__(self) -> None:
        self._answers = self.request.answer_count
        self.usage = TokenUsage([len(self.prompt.tokens)], self._answers)
        kind = "chat.completion.chunk" if self.request.stream else "chat.completion"
        self._head = answer_head(self.frontend, self.request, "chatcmpl-", kind)

    def _deltas(self) -> AsyncGenerator[MessageDelta, None]:
        request = self.request
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return generate_messages(self.frontend, request, self.prompt, self.max_tokens, key=self.key, logprobs=logprobs)

    def _logprobs(self, delta: MessageDelta) -> list[dict[str, Any]]:
        """The log-probabilities of the text's tokens, without a token that only ends the answer."""
        ends, tokenizer = self.frontend.engine.facts.ends, self.frontend.tokenizer
        return [_describe_logprob(tokenizer, each) for each in delta.text.logprobs if each.token not in ends]

    async def response(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""} for _ in range(self._answers)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in messages]
        finish: list[str | None] = [None] * self._answers
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                self.usage.add_message(delta)
                index = delta.text.index
                message = messages[index]
                message["content"] += delta.content
                if delta.reasoning:
                    for name in REASONING_NAMES:
                        message[name] = message.get(name, "") + delta.reasoning
                for part in delta.calls:
                    add_call(message.setdefault("tool_calls", []), part)
                logprobs[index] += self._logprobs(delta)
                finish[index] = delta.finish or finish[index]
        choices = []
        for index, message in enumerate(messages):
            if "tool_calls" in message:
                message["content"] = message["content"] or None
            content = {"content": logprobs[index]} if self.request.logprobs else None
            choices.append({"index": index, "message": message, "logprobs": content, "finish_reason": finish[index]})
        return {**self._head, "choices": choices, "usage": self.usage.as_json()}

    def stream(self) -> AsyncGenerator[bytes, None]:
        return choice_events(self._choices(), self._head, self.request, self.usage)

    async def _choices(self) -> AsyncGenerator[dict[str, Any], None]:
        started = [False] * self._answers
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                self.usage.add_message(delta)
                index = delta.text.index
                if not started[index]:
                    started[index] = True
                    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                change: dict[str, Any] = {}
                if delta.reasoning:
                    change |= dict.fromkeys(REASONING_NAMES, delta.reasoning)
                if delta.content:
                    change["content"] = delta.content
                if delta.calls:
                    change["tool_calls"] = delta.calls
                logprobs = self._logprobs(delta) if self.request.logprobs else []
                if change or logprobs or delta.finish:
                    choice = {"index": index, "delta": change, "finish_reason": delta.finish}
                    yield {**choice, "logprobs": {"content": logprobs}} if logprobs else choice


def add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """Add a call, or append to the arguments of one, or to the input of a custom tool."""
    kind, text = ("custom", "input") if "custom" in part else ("function", "arguments")
    if "id" in part:
        calls.append({"id": part["id"], "type": kind, kind: dict(part[kind])})
    else:
        calls[part["index"]][kind][text] += part[kind][text]


def _describe_logprob(tokenizer: ServerTokenizer, logprob: TokenLogprob) -> dict[str, Any]:
    tops = [_describe_token(tokenizer, token, value) for token, value in logprob.top]
    return {**_describe_token(tokenizer, logprob.token, logprob.logprob), "top_logprobs": tops}


def _describe_token(tokenizer: ServerTokenizer, token: int, logprob: float) -> dict[str, Any]:
    text, values = tokenizer.token_text(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(values)}
