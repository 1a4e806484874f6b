# SPDX-License-Identifier: Apache-2.0
"""Messages in the form that a model's chat template takes, and the text that it makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Literal

from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.chat import ContentPart, Message, TemplateFields
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.structured import depth_of
from anyaccel.serve.requests.tools import instructions

Ending = Literal[
    "answer", "none", "continue"
]  # the prompt opens an answer, adds nothing, or leaves the last message open


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as transformers' users give them to chat templates: content as one text, arguments of calls as objects.

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
    content: str | None = text_of(message.content, f"{where}.content")
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    made: dict[str, Any] = {"role": role}
    if message.tool_calls and message.content is None:
        content = None  # templates tell a message that has only calls by that
    if content is not None or "content" in message.model_fields_set:
        made["content"] = content
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
    frontend: Frontend,
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
    template = frontend.texts.tool_template if tools else frontend.texts.template
    if tools and "tools" not in template:
        if made[0]["role"] != "system":
            made.insert(0, {"role": "system", "content": ""})
        made[0]["content"] = "\n\n".join(filter(None, (made[0]["content"], instructions(tools))))
        tools = ()
    if "tool_calls" not in template and any("tool_calls" in each or each["role"] == "tool" for each in made):
        made = _calls_as_text(made)
    mark = ""
    if ending == "continue":
        # To cut off what the template writes after the last message, render it with an unguessable mark at its end.
        mark = new_id("end")
        made[-1] = {**made[-1], "content": f"{made[-1].get('content') or ''}{mark} "}
    text = _best(made, lambda each: frontend.texts.conversation(each, tools or None, more, ending != "answer"))
    if not mark:
        return text
    text, found, rest = text.rpartition(mark)
    if not found:
        raise wrong("continue_final_message", "the model's chat template does not show the last message")
    return text if rest.startswith(" ") else text.rstrip()  # this template trims messages, so trim this one


def _best(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """The conversation with its calls in the form that the template can write.

    Most templates take arguments as objects, and a message without content, as transformers gives them. Some want
    JSON's text for the arguments, or a text for the content: they fail, or write Python's `{'city': ...}` or `None`.

    Raises:
        ApiError: the template takes none of the forms.
    """
    if not any("tool_calls" in message for message in messages):
        return render(messages)
    first: ApiError | str | None = None
    tried: list[Any] = []
    for content, arguments in product((_as_sent, _with_none, _with_content), (_as_sent, _with_texts)):
        form = [arguments(content(message)) for message in messages]
        if form in tried:
            continue
        tried.append(form)
        try:
            text = render(form)
        except ApiError as error:
            first = first or error
            continue
        if not _has_python(text, messages, form):
            return text
        first = text if not isinstance(first, str) else first
    if isinstance(first, ApiError):
        raise first
    assert first is not None
    return first


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _with_none(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, **message}


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message.get("content") or ""}


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON's text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_python(text: str, messages: Sequence[Mapping[str, Any]], form: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template has written arguments as Python's text, text of JSON as a text in JSON, or None."""
    wrong_ones = set()
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if arguments and not isinstance(arguments, str):
                wrong_ones |= {repr(arguments), json.dumps(_json(arguments), ensure_ascii=False)} - {_json(arguments)}
    if any(each in text for each in wrong_ones):
        return True
    without = any("tool_calls" in message and message.get("content") is None for message in form)
    return without and text.count("None") > json.dumps(form, ensure_ascii=False).count("None")


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
        role, content = message["role"], message.get("content") or ""
        for call in message.get("tool_calls", ()):
            content = (
                f"{content}\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>".strip()
            )
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        made.append({"role": role, "content": content})
    return made
