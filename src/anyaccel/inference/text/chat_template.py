# SPDX-License-Identifier: Apache-2.0
"""Renders a model's chat template as transformers does, without it: jinja2 in its sandbox, with their helpers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.extras import pip_line
from anyaccel.validation import error_text

# What a template may take: processor time of its thread, and characters of a text. Those of real models take
# milliseconds for a long conversation; one that never ends would take the server with it.
_MOST_SECONDS = 5.0
_MOST_CHARACTERS = 1 << 26

Message = Mapping[str, Any]  # role, content, and what a server adds: tool_calls, tool_call_id, reasoning_content


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)  # the template wants the user's own time


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Any:
    """jinja2's sandbox with transformers' helpers, and with an end of what a template may take.

    Raises:
        AnyAccelError: jinja2 is missing.
    """
    try:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise AnyAccelError(f"chat templates need jinja2: {pip_line('jinja2')} ({error})") from None

    class Generation(Extension):
        """`{% generation %}` marks the answers of a training text; the text is what is inside."""

        tags = {"generation"}  # noqa: RUF012  jinja2's own name and kind

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "%"])

        def __init__(self) -> None:
            super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
            self.limit = threading.local()  # until when this thread's template may run

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            """What the template does, with a call of `go_on` wherever something may be repeated."""
            tree = super()._parse(source, name, filename)
            for each in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
                assert isinstance(each, nodes.For | nodes.Macro | nodes.CallBlock)
                each.body.insert(0, nodes.ExprStmt(self._call("go_on", [], each.lineno), lineno=each.lineno))
            for parent in [tree, *tree.find_all(nodes.Node)]:
                for field, value in parent.iter_fields():
                    if isinstance(value, nodes.Concat):
                        setattr(parent, field, self._call("joined", value.nodes, value.lineno))
                    elif isinstance(value, list):
                        value[:] = [
                            self._call("joined", each.nodes, each.lineno) if isinstance(each, nodes.Concat) else each
                            for each in value
                        ]
            tree.set_environment(self)
            return tree

        @staticmethod
        def _call(name: str, arguments: list[Any], line: int) -> Any:
            called = nodes.EnvironmentAttribute(name, lineno=line)
            return nodes.Call(called, arguments, [], None, None, lineno=line)

        def go_on(self) -> str:
            if time.thread_time() > self.limit.end:
                _raise_exception(f"it has taken more than {_MOST_SECONDS:g} s")
            return ""

        def joined(self, *parts: Any) -> str:
            texts = [str(part) for part in parts]
            _check_length(sum(map(len, texts)))
            return "".join(texts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "*":
                for text, times in ((left, right), (right, left)):
                    if isinstance(text, str | list | tuple) and isinstance(times, int):
                        _check_length(len(text) * times)
            elif operator == "+" and isinstance(left, str | list) and isinstance(right, str | list):
                _check_length(len(left) + len(right))
            return super().call_binop(context, operator, left, right)

    environment = Environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _check_length(characters: int) -> None:
    if characters > _MOST_CHARACTERS:
        _raise_exception(f"it makes a text of {characters} characters")


class ChatTemplate:
    """One template.

    Args:
        source: in jinja2, of the model's tokenizer.
        special: names such as bos_token -> its text.
        where: the file that it is from, for messages.

    Raises:
        ModelError: it is no template.
    """

    def __init__(self, source: str, special: Mapping[str, str], where: str = "the model") -> None:
        environment = _environment()
        self._limit = environment.limit
        self._special = dict(special)
        self._where = where
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2 makes a program of it, which can be none in any way
            raise ModelError(f"{where}: its chat template cannot be read: {error_text(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        continue_answer: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model has learned to read it, up to where its answer begins.

        Args:
            tools: functions that the model may call, as OpenAI describes them.
            more: other variables of the template, `enable_thinking` for example; they take no name of ours away.

        Raises:
            ModelError: the template refuses the conversation (a role that it does not know, a wrong order), or takes
                more than seconds or makes more than 64 Mi characters of it.
        """
        given = {
            **(more or {}),
            **self._special,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": not continue_answer,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
        }
        self._limit.end = time.thread_time() + _MOST_SECONDS
        try:
            pieces, length = [], 0
            for piece in self._template.generate(given):
                length += len(piece)
                _check_length(length)
                pieces.append(piece)
            return "".join(pieces)
        except Exception as error:  # a template is a program: it can fail in any way
            raise ModelError(
                f"{self._where}: its chat template does not take this conversation: {error_text(error)}"
            ) from error
