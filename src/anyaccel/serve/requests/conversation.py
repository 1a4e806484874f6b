# SPDX-License-Identifier: Apache-2.0
"""From a conversation to a prompt: messages in the form that the model's chat template takes, tools, and a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anyaccel.serve.interface import Grammar
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import AllowedTools, ChatMessage, ContentPart, NamedTool, TemplateFields, Tool
from anyaccel.serve.protocol.errors import ApiError, wrong
from anyaccel.serve.requests.frontend import Frontend, new_id
from anyaccel.serve.requests.structured import answer_grammar, callable_functions, nesting_depth
from anyaccel.serve.requests.tools.format import ToolFormat
from anyaccel.serve.requests.tools.formats import instructions

# The prompt opens an answer, adds nothing, or leaves the last message open.
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
Ending = Literal["answer", "none", "continue"]
_THINKING_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking", "thinking_budget")


@dataclass(frozen=True)
class Prompt:
    """A conversation as tokens, and how to parse its answer.

    Attributes:
        reasoning: whether the prompt has opened the model's reasoning; None: the model writes none.
        calls: whether the answer has no calls, may have some, or consists of them by a grammar.
        several: whether an answer may have more than one call.
        grammar: the constraint on the answer.
        schemas: the parameters of the functions that may be called, by name.
        continues: whether the answer continues the last message.
        ends: tokens that end the answer, beside those of the model.
        customs: names of the tools whose calls have a text instead of arguments.
    """

    tokens: list[int]
    reasoning: bool | None
    calls: Literal["none", "auto", "required"] = "none"
    several: bool = True
    grammar: Grammar | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    ends: frozenset[int] = frozenset()
    customs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Thinking:
    """What a request says about the model's thoughts.

    Attributes:
        effort: "none", "low", "medium", "high" or another word that the model knows; None: it is not said.
        budget: the most tokens of thoughts; None: any number.
    """

    effort: str | None = None
    budget: int | None = None

    def variables(self, template: str) -> dict[str, Any]:
        """The variables of a chat template that say this, as far as it has some."""
        has = {name for name in _THINKING_VARIABLES if re.search(rf"\b{name}\b", template)}
        made: dict[str, Any] = {}
        if self.effort is not None:
            switch = self.effort != "none"
            made |= dict.fromkeys(has & {"enable_thinking", "thinking"}, switch)
            if "reasoning_effort" in has:
                # gpt-oss knows neither of these words, and always thinks.
                made["reasoning_effort"] = {"none": "low", "minimal": "low"}.get(self.effort, self.effort)
            if "thinking_budget" in has and not switch:
                made["thinking_budget"] = 0
        if self.budget is not None and "thinking_budget" in has:
            made["thinking_budget"] = self.budget
        return made


def describe_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The functions in the form that chat templates take."""
    return [{"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in tools or ()]


async def build_prompt(
    frontend: Frontend,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    choice: str | NamedTool | AllowedTools | None = None,
    parallel: bool | None = None,
    grammar: Grammar | None = None,
    thinking: Thinking = Thinking(),
    template_kwargs: Mapping[str, Any] | None = None,
    ending: Ending = "answer",
) -> Prompt:
    """The prompt of a conversation.

    Args:
        parallel: whether an answer may have more than one call. Where a request leaves it out, a call that is required
            is one: models of any size would go on as long as a grammar lets them.
        grammar: the constraint on the message. An answer may be a call instead, or has to be.

    Raises:
        ApiError: the conversation, the tools or the choice cannot be used.
    """
    if isinstance(choice, AllowedTools):  # the model does not see the others
        tools, choice = _allowed(tools or (), choice), choice.mode
    described = describe_tools(tools)
    functions = callable_functions(tools or ())
    calls: Literal["none", "auto", "required"] = "auto" if described and choice != "none" else "none"
    several = parallel is not False
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            raise wrong("tool_choice", f"no function {choice.function.name[:64]!r} in tools")
        calls, several = "required", False
    elif choice == "required":
        if not described:
            raise wrong("tool_choice", '"required" needs tools')
        calls, several = "required", parallel is True
    if calls == "required":
        _check_grammars(tools or (), {function.name for function in functions})
    variables = {**thinking.variables(frontend.tokenizer.template), **(template_kwargs or {})}
    text = render(frontend, messages, described if choice != "none" else [], variables, ending)
    thoughts = frontend.reasoning
    is_open = thoughts is not None and thoughts.is_open(text)
    if thoughts is not None and ending == "continue":
        is_open = thoughts.is_inside(content_text(messages[-1].content, ""))
        if frontend.tool_format.is_messages:
            thoughts = None
    if calls == "required":
        grammar = None
    if thinking.budget is not None and thoughts is None:
        raise wrong("thinking_token_budget", "this model writes no thoughts")
    if grammar is not None or calls == "required" or thinking.budget is not None:
        # Without a constraint on the message, it may be a call anyway.
        form = frontend.tool_format if calls == "required" or (calls == "auto" and grammar is not None) else None
        grammar = answer_grammar(
            grammar,
            frontend.tokenizer.token_id,
            thoughts=thoughts,
            is_open=is_open,
            budget=thinking.budget,
            form=form,
            functions=functions,
            several=several,
        )
    tokens = await frontend.tokenizer.encode(text, False)
    schemas = {function.name: function.schema for function in functions}
    reasoning = is_open if frontend.reasoning is not None else None
    return Prompt(tokens, reasoning, calls, several, grammar, schemas, ending == "continue")


def _check_grammars(tools: Sequence[Tool], names: Collection[str]) -> None:
    """A required call is held to what its tool takes; within a model's format that cannot be a grammar in Lark.

    Raises:
        ApiError: one of these tools has such a grammar.
    """
    for place, tool in enumerate(tools):
        form = tool.custom.format if tool.custom is not None and tool.function.name in names else None
        if form is not None and form.grammar is not None and form.grammar.syntax == "lark":
            param = f"tools[{place}].custom.format.grammar.syntax"
            raise wrong(param, "a required call is held to a regex only; leave tool_choice to the model, or use regex")


def _allowed(tools: Sequence[Tool], choice: AllowedTools) -> list[Tool]:
    """The tools that a choice allows.

    Raises:
        ApiError: it allows one that there is not.
    """
    wanted = [each.function.name for each in choice.tools]
    if unknown := [name for name in wanted if name not in [tool.function.name for tool in tools]]:
        raise wrong("tool_choice", f"no function {unknown[0][:64]!r} in tools")
    return [tool for tool in tools if tool.function.name in wanted]


def prompt_ending(request: TemplateFields) -> Ending:
    """The options about the end of a conversation's prompt, with vLLM's meanings.

    Raises:
        ApiError: it cannot end in both ways.
    """
    if not request.continue_final_message:
        return "none" if request.add_generation_prompt is False else "answer"
    if request.add_generation_prompt:
        raise wrong("continue_final_message", "cannot be true together with add_generation_prompt")
    return "continue"


def content_text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    """The content of a message as one text.

    Raises:
        ApiError: a part is not text.
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


# The chat template ----------------------------------------------------------------------------------------


def render(
    frontend: Frontend,
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None,
    ending: Ending = "answer",
) -> str:
    """A conversation as the model reads it.

    Raises:
        ApiError: the model's chat template does not take it.
    """
    if template_kwargs and (
        nesting_depth(template_kwargs) > limits.MOST_DEPTH or len(json.dumps(template_kwargs)) > limits.MOST_VALUES
    ):
        raise wrong("chat_template_kwargs", f"more than {limits.MOST_VALUES} characters, or too deep")
    rendered = [_template_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    _name_calls(rendered, frontend.tool_format)
    template = frontend.tokenizer.tool_template if tools else frontend.tokenizer.template
    if tools and "tools" not in template:
        if rendered[0]["role"] != "system":
            rendered.insert(0, {"role": "system", "content": ""})
        rendered[0]["content"] = "\n\n".join(filter(None, (rendered[0]["content"], instructions(tools))))
        tools = ()
    if "tool_calls" not in template and any("tool_calls" in each or each["role"] == "tool" for each in rendered):
        rendered = [_calls_as_text(each) for each in rendered]
    mark = ""
    if ending == "continue":
        # To cut off what the template writes after the last message, render it with an unguessable mark at its end.
        mark = new_id("end")
        rendered[-1] = {**rendered[-1], "content": f"{rendered[-1].get('content') or ''}{mark} "}
    text = _render_calls(
        rendered,
        lambda each: frontend.tokenizer.apply_chat_template(each, tools or None, template_kwargs, ending == "answer"),
    )
    if not mark:
        return text
    text, found, rest = text.rpartition(mark)
    if not found:
        raise wrong("continue_final_message", "the model's chat template does not show the last message")
    return text if rest.startswith(" ") else text.rstrip()  # this template trims messages, so trim this one


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as transformers' users give it to chat templates: content as one text, arguments as an object."""
    content: str | None = content_text(message.content, f"{where}.content")
    made: dict[str, Any] = {"role": {"developer": "system", "function": "tool"}.get(message.role, message.role)}
    if message.tool_calls and message.content is None:
        content = None  # by this templates recognise a message that has only calls
    if content is not None or "content" in message.model_fields_set:
        made["content"] = content
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thoughts is not None:
        made["reasoning_content"] = thoughts
        if not (message.tool_calls and content):
            made["thinking"] = thoughts  # gpt-oss's name; its template refuses thoughts beside both
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _name_calls(messages: Sequence[dict[str, Any]], form: ToolFormat) -> None:
    """Give calls ids where they have none, or none that the template takes; results get that of their call.

    A client may leave them out (Ollama's do): then results are in the order of the calls.
    """
    named: dict[str, str] = {}
    count = 0
    open_calls: list[dict[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            given, name = call["id"], call["function"]["name"]
            if form.identity and not given.startswith(form.identity.format(name=name, index="")):
                call["id"] = form.identity.format(name=name, index=count)
            elif not given or (form.short_ids and not _SHORT_ID.fullmatch(given)):
                call["id"] = new_id("")[:9] if form.short_ids else new_id("call_")
            count += 1
            named[given] = call["id"]
            open_calls.append(call)
        if message["role"] != "tool":
            continue
        given = message.get("tool_call_id", "")
        name = message.get("name")
        found = next((call for call in open_calls if given and call["id"] == named.get(given)), None)
        if found is None and not given:
            found = next((call for call in open_calls if name in (None, call["function"]["name"])), None)
        if found is not None:
            open_calls.remove(found)
            message["tool_call_id"] = found["id"]


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _calls_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with calls and their results as plain text, for a template that supports neither."""
    role, content = message["role"], message.get("content") or ""
    for call in message.get("tool_calls", ()):
        content = f"{content}\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>".strip()
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    return {"role": role, "content": content}


def _render_calls(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """The conversation with its calls in the form that the template can write.

    Most templates take arguments as objects, and a message without content, as transformers gives them. Some want
    JSON's text for the arguments, or a text for the content: they fail, or write Python's `{'city': ...}` or `None`.

    Raises:
        ApiError: the template takes none of the forms.
    """
    if not any("tool_calls" in message for message in messages):
        return render(messages)
    error: ApiError | None = None
    with_python: str | None = None
    for form in _forms(messages):
        try:
            text = render(form)
        except ApiError as problem:
            error = error or problem
            continue
        if not _has_python(text, messages, form):
            return text
        with_python = with_python or text
    if with_python is None:
        assert error is not None
        raise error
    return with_python


def _forms(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The forms in which a template may want messages that have calls, each once."""
    tried: list[list[dict[str, Any]]] = []
    for with_content in (
        lambda message: message,
        lambda message: {"content": None, **message},
        lambda message: {**message, "content": message.get("content") or ""},
    ):
        for with_arguments in (lambda message: message, _with_text_arguments):
            form = [with_arguments(with_content(message)) for message in messages]
            if form not in tried:
                tried.append(form)
                yield form


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
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
    python = set()
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if arguments and not isinstance(arguments, str):
                python |= {repr(arguments), json.dumps(_json(arguments), ensure_ascii=False)} - {_json(arguments)}
    if any(each in text for each in python):
        return True
    no_content = any("tool_calls" in message and message.get("content") is None for message in form)
    return no_content and text.count("None") > json.dumps(form, ensure_ascii=False).count("None")
