# SPDX-License-Identifier: Apache-2.0
"""From messages to a prompt, and from an answer's text to thoughts, content and calls: chat and responses share it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from anyaccel.serve import limits
from anyaccel.serve.answer_grammar import answer_grammar, parameter_grammars, required_calls
from anyaccel.serve.answers import AnswerText, Piece, merged, pieces
from anyaccel.serve.api_errors import ApiError, wrong
from anyaccel.serve.contract import Grammar
from anyaccel.serve.front import Front, new_id
from anyaccel.serve.protocol import GenerationFields
from anyaccel.serve.protocol_chat import ContentPart, Message, NamedTool, TemplateFields, Tool
from anyaccel.serve.reasoning import BEGIN, END, Thoughts
from anyaccel.serve.structured import depth_of
from anyaccel.serve.tools import CallsInArray, CallsInText, instructions

Ending = Literal[
    "answer", "none", "continue"
]  # the prompt opens an answer, adds nothing, or leaves the last message open


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


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content as one text, arguments of calls as objects.

    Raises:
        ApiError: a part is no text.
    """
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def text_of(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """Content as one text.

    Raises:
        ApiError: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        name = "text" if part.type in ("text", "input_text", "output_text") else "refusal"
        text: str | None = getattr(part, name)
        if text is None and (name == "text" or part.type == name):
            raise wrong(f"{where}[{place}].{name}", f"is required in a part of type {part.type}")
        if text is None:
            raise wrong(
                f"{where}[{place}]",
                f"a part of type {part.type[:40]!r} is not supported: the model reads text, and nothing is fetched",
            )
        texts.append(text)
    return "\n".join(texts)


def _message(message: Message, where: str) -> dict[str, Any]:
    content = text_of(message.content, f"{where}.content")
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    made: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or new_id("call_"),
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def check_values(values: Mapping[str, Any] | None) -> None:
    """Refuse variables of a template that are large or deep.

    Raises:
        ApiError: they are.
    """
    if values and (depth_of(values) > limits.MOST_DEPTH or len(json.dumps(values)) > limits.MOST_VALUES):
        raise wrong("chat_template_kwargs", f"more than {limits.MOST_VALUES} characters, or too deep")


def rendered(
    front: Front,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any] | None,
    ending: Ending = "answer",
) -> str:
    """A conversation as the model reads it.

    Raises:
        ApiError: the model's chat template does not take it.
    """
    check_values(more)
    made = for_template(messages)
    if "tools" not in front.texts.template:
        if tools:
            if made[0]["role"] != "system":
                made.insert(0, {"role": "system", "content": ""})
            made[0]["content"] = "\n\n".join(filter(None, (made[0]["content"], instructions(tools))))
        if tools or any("tool_calls" in message or message["role"] == "tool" for message in made):
            made, tools = _calls_as_text(made), ()
    if ending != "continue":
        return front.texts.conversation(made, tools or None, more, ending == "none")
    # To cut off what the template writes after the last message, render it with an unguessable mark at its end.
    mark = new_id("end")
    made[-1] = {**made[-1], "content": f"{made[-1]['content']}{mark} "}
    text, found, rest = front.texts.conversation(made, tools or None, more, True).rpartition(mark)
    if not found:
        raise wrong("continue_final_message", "the model's chat template does not show the last message")
    return text if rest.startswith(" ") else text.rstrip()  # this template trims messages, so trim this one


def ending_of(request: TemplateFields) -> Ending:
    """The options about the end of a conversation's prompt, with vLLM's meanings.

    Raises:
        ApiError: it cannot end in both ways.
    """
    if not request.continue_final_message:
        return "none" if request.add_generation_prompt is False else "answer"
    if request.add_generation_prompt:
        raise wrong("continue_final_message", "cannot be true together with add_generation_prompt")
    return "continue"


def _calls_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls and their results as plain text, for a template that supports neither."""
    made = []
    for message in messages:
        role, content = message["role"], message["content"]
        for call in message.get("tool_calls", ()):
            content = (
                f"{content}\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>".strip()
            )
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        made.append({"role": role, "content": content})
    return made


def described_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The functions in the form that chat templates take."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools or ()]


async def prompt_of(
    front: Front,
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
    text = rendered(front, messages, described if choice != "none" else [], more, ending)
    inside = text.rstrip().endswith(BEGIN)
    if ending == "continue":
        last = text_of(messages[-1].content, "")
        inside = last.rfind(BEGIN) > last.rfind(END)
    thoughts = inside if front.thinking else None
    if grammar is not None:
        form = front.format if calls == "text" else None
        grammar = answer_grammar(grammar, thoughts, front.texts.token_of, form, described, parallel is not False)
    functions = frozenset(each["function"]["name"] for each in described)
    tokens = await front.texts.encode(text, False)
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

    def __init__(self, prompt: Prompt, front: Front, several: bool = True) -> None:
        self._thoughts = None if prompt.thoughts is None else Thoughts(prompt.thoughts)
        self._calls: CallsInText | CallsInArray | None = None
        self._named = ""
        if prompt.calls == "text":
            self._calls = CallsInText(front.format, prompt.names)
        elif prompt.calls == "array":
            self._calls = CallsInArray()
        else:
            self._named = prompt.calls
        self._most = None if several else 1
        self._short_ids = front.format.name == "mistral"  # its templates only take ids of nine characters
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
    front: Front,
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
    special = request.skip_special_tokens is False or (prompt.calls == "text" and front.format.special)
    decode = front.texts.with_special if special else front.texts.decode
    keep = bool(request.include_stop_str_in_output)
    streams = []
    for index in range(answers):
        asked = front.generation(
            request, prompt.tokens, max_tokens, index=index, key=key, logprobs=logprobs, grammar=prompt.grammar
        )
        before = prompt.tokens if prompt.goes_on else ()
        text = AnswerText(decode, asked.ends, stops, keep, before, quiet=asked.min_tokens)
        streams.append(pieces(front.engine, asked, text, index, front.metrics))
    parsers = [AnswerParser(prompt, front, several) for _ in streams]
    async with aclosing(merged(streams)) as found:
        async for piece in found:
            yield parsers[piece.index].add(piece)


def answer_room(front: Front, prompt: Sequence[int], wanted: int | None, param: str, prompt_param: str) -> int:
    """Tokens that an answer may have: what is wanted, else what the context leaves.

    Raises:
        ApiError: there is no room for them.
    """
    if wanted is not None:
        return front.check_room(prompt, wanted, param, prompt_param)
    room = front.room(prompt, prompt_param)
    if room is None:
        raise ApiError(400, f"{param}: is required, as this model has no longest text", param)
    return room
