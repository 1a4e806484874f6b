# SPDX-License-Identifier: Apache-2.0
"""From a conversation to a prompt, and from an answer's text to thoughts, content and calls, for chat and responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from anyaccel.serve.interface import Grammar
from anyaccel.serve.protocol.chat import Message, NamedTool, Tool
from anyaccel.serve.protocol.common import GenerationFields
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.requests.answer_grammar import answer_grammar, parameter_grammars, required_calls
from anyaccel.serve.requests.answers import AnswerText, Piece, merged, pieces
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.reasoning import BEGIN, END, Thoughts
from anyaccel.serve.requests.rendering import Ending, rendered, text_of
from anyaccel.serve.requests.tools import CallsInArray, CallsInText


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens, and how to parse its answer.

    Attributes:
        thoughts: whether the prompt has opened the model's thoughts; None: the model writes none.
        calls: "": the answer has no calls; "text": it has calls in the model's format; "array": a grammar makes it a
            list of calls; otherwise the name of the one function whose arguments the answer is.
        grammar: the constraint on the answer.
        names: the functions that may be called.
        goes_on: whether the answer continues the last message.
    """

    tokens: list[int]
    thoughts: bool | None
    calls: str = ""
    grammar: Grammar | None = None
    names: frozenset[str] = frozenset()
    goes_on: bool = False


def described_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The functions in the form that chat templates take."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools or ()]


async def prompt_of(
    frontend: Frontend,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    choice: str | NamedTool | None,
    parallel: bool | None,
    grammar: Grammar | None,
    more: Mapping[str, Any] | None,
    ending: Ending = "answer",
) -> Prompt:
    """The prompt of a conversation.

    Args:
        parallel: whether an answer may have more than one call. Without a word about it (None), one that is required
            has one: models of any size would go on with what a grammar lets them.
        grammar: what the request holds the message to. An answer may be a call instead, or has to be.

    Raises:
        ApiError: the conversation, the tools or the choice cannot be used.
    """
    described = described_tools(tools)
    arguments = parameter_grammars(described)
    calls = "text" if described and choice != "none" else ""
    if isinstance(choice, NamedTool):
        calls = choice.function.name
        names = [each["function"]["name"] for each in described]
        if calls not in names:
            raise wrong("tool_choice", f"no function {calls[:64]!r} in tools")
        grammar = arguments[names.index(calls)]
    elif choice == "required":
        if not described:
            raise wrong("tool_choice", '"required" needs tools')
        calls = "array"
        grammar = required_calls(described, None if parallel else 1)
    text = rendered(frontend, messages, described if choice != "none" else [], more, ending)
    inside = text.rstrip().endswith(BEGIN)
    if ending == "continue":
        last = text_of(messages[-1].content, "")
        inside = last.rfind(BEGIN) > last.rfind(END)
    thoughts = inside if frontend.thinking else None
    if grammar is not None:
        form = frontend.format if calls == "text" else None
        grammar = answer_grammar(grammar, thoughts, frontend.texts.token_of, form, described, parallel is not False)
    functions = frozenset(each["function"]["name"] for each in described)
    tokens = await frontend.texts.encode(text, False)
    return Prompt(tokens, thoughts, calls, grammar, functions, ending == "continue")


@dataclass(slots=True)
class Delta:
    """A piece of an answer, divided into content, thoughts and calls.

    Attributes:
        piece: the piece itself, with its log-probabilities and counts.
        calls: parts of calls, in the form of a stream's deltas.
    """

    piece: Piece
    content: str = ""
    thoughts: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None


class AnswerParser:
    """Parses one answer while it comes."""

    def __init__(self, prompt: Prompt, frontend: Frontend, several: bool = True) -> None:
        self._thoughts = None if prompt.thoughts is None else Thoughts(prompt.thoughts)
        self._calls: CallsInText | CallsInArray | None = None
        self._named = ""
        if prompt.calls == "text":
            self._calls = CallsInText(frontend.format, prompt.names)
        elif prompt.calls == "array":
            self._calls = CallsInArray()
        else:
            self._named = prompt.calls
        self._most = None if several else 1
        self._short_ids = frontend.format.name == "mistral"  # its templates only take ids of nine characters
        self._count = 0

    def add(self, piece: Piece) -> Delta:
        """The parsed form of the next piece."""
        last = piece.finish is not None
        delta = Delta(piece, finish=piece.finish)
        text = piece.text
        if self._thoughts is not None:
            delta.thoughts, text = self._thoughts.add(text, last)
        if self._named:
            if not self._count and (text or last):
                delta.calls.append(self._begin(self._named, text))
            elif text:
                delta.calls.append({"index": 0, "function": {"arguments": text}})
        elif self._calls is not None:
            delta.content, found = self._calls.add(text, last)
            for call in found:
                if self._most is None or self._count < self._most:
                    delta.calls.append(self._begin(call.name, call.arguments))
        else:
            delta.content = text
        if self._count and delta.finish == "stop":
            delta.finish = "tool_calls"
        return delta

    def _begin(self, name: str, arguments: str) -> dict[str, Any]:
        index, self._count = self._count, self._count + 1
        identity = new_id("")[:9] if self._short_ids else new_id("call_")
        return {"index": index, "id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


async def deltas(
    frontend: Frontend,
    request: GenerationFields,
    prompt: Prompt,
    *,
    max_tokens: int,
    answers: int = 1,
    stops: Sequence[str] = (),
    logprobs: int | None = None,
    several: bool = True,
    key: str = "",
) -> AsyncGenerator[Delta, None]:
    """The answers to a conversation as they come.

    Raises:
        AnyAccelError, ApiError: see `Engine.generate`.
    """
    special = request.skip_special_tokens is False or (prompt.calls == "text" and frontend.format.special)
    decode = frontend.texts.with_special if special else frontend.texts.decode
    keep = bool(request.include_stop_str_in_output)
    streams = []
    for index in range(answers):
        asked = frontend.generation(
            request, prompt.tokens, max_tokens, index=index, key=key, logprobs=logprobs, grammar=prompt.grammar
        )
        before = prompt.tokens if prompt.goes_on else ()
        text = AnswerText(decode, asked.ends, stops, keep, before, quiet=asked.min_tokens)
        streams.append(pieces(frontend.engine, asked, text, index, frontend.metrics))
    parsers = [AnswerParser(prompt, frontend, several) for _ in streams]
    async with aclosing(merged(streams)) as found:
        async for piece in found:
            yield parsers[piece.index].add(piece)


def answer_room(frontend: Frontend, prompt: Sequence[int], wanted: int | None, param: str, prompt_param: str) -> int:
    """Tokens that an answer may have: what is wanted, else what the context leaves.

    Raises:
        ApiError: there is no room for them.
    """
    if wanted is not None:
        return frontend.check_room(prompt, wanted, param, prompt_param)
    room = frontend.room(prompt, prompt_param)
    if room is None:
        raise ApiError(400, f"{param}: is required, as this model has no longest text", param)
    return room
