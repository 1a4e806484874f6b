# SPDX-License-Identifier: Apache-2.0
"""Renders a model's chat template as transformers does, without it: jinja2 in its sandbox, with their helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.extras import pip_line
from anyaccel.outside import told

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

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special)
        self._where = where
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2 makes a program of it, which can be none in any way
            raise ModelError(f"{where}: its chat template cannot be read: {told(error)}") from error

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
            ModelError: the template refuses the conversation (a role that it does not know, a wrong order).
        """
        try:
            return self._template.render(
                {
                    **(more or {}),
                    **self._special,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": not continue_answer,
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None,
                }
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ModelError(
                f"{self._where}: its chat template does not take this conversation: {told(error)}"
            ) from error
