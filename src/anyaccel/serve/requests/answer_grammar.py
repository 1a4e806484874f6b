# SPDX-License-Identifier: Apache-2.0
"""The grammar of a whole answer: first the model's thoughts, then what a request holds the answer to, or calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyaccel.serve.interface import Grammar
from anyaccel.serve.json_schema import EMPTY_OBJECT, moved
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.reasoning import BEGIN, END
from anyaccel.serve.requests.structured import schema_grammar
from anyaccel.serve.requests.tools import Format

Tools = Sequence[Mapping[str, Any]]
TokenOf = Callable[[str], int | None]
Mark = Callable[[str], str]


def parameters_of(tool: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments; without one it has none, as with OpenAI."""
    return tool["function"].get("parameters") or EMPTY_OBJECT


def parameter_grammars(tools: Tools) -> list[Grammar]:
    """The arguments of each function.

    Raises:
        ApiError: a schema cannot be used.
    """
    found = []
    for place, tool in enumerate(tools):
        param, schema = f"tools[{place}].function.parameters", parameters_of(tool)
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise wrong(
                param, f"type is {json.dumps(kind)[:40]}: arguments are an object; put it into one of its properties"
            )
        found.append(schema_grammar(schema, param))
    return found


def required_calls(tools: Tools, most: int | None) -> Grammar:
    """A JSON list of at least one call.

    Raises:
        ApiError: a schema cannot be used.
    """
    arguments = parameter_grammars(tools)
    return _of_calls(array_schema(tools, arguments, "parameters", most), arguments)


def _of_calls(schema: dict[str, Any], arguments: Sequence[Grammar]) -> Grammar:
    made = schema_grammar(schema, "tools")
    return replace(made, parts=tuple(("", each) for each in arguments))


def array_schema(tools: Tools, arguments: Sequence[Grammar], key: str, most: int | None) -> dict[str, Any]:
    """The schema of a list of at least one call of these functions."""
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": _call_schema(tools, arguments, key, "#/items")}
    return schema if most is None else {**schema, "maxItems": most}


def _call_schema(tools: Tools, arguments: Sequence[Grammar], key: str, where: str) -> dict[str, Any]:
    """The schema of one call, whose arguments are at `key`; it is `where` in the schema that gets it."""
    where += "" if len(tools) == 1 else "/anyOf/{}"
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool["function"]["name"]]},
                key: moved(json.loads(schema.text), f"{where.format(place)}/properties/{key}"),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for place, (tool, schema) in enumerate(zip(tools, arguments, strict=True))
    ]
    return each[0] if len(each) == 1 else {"anyOf": each}


def _calls(form: Format, tools: Tools, several: bool, mark: Mark) -> tuple[str, list[tuple[str, Grammar]]]:
    """The rule `calls` of a format, and the grammars that it names."""
    arguments = parameter_grammars(tools)
    written = re.sub("‹(.+?)›", lambda found: mark(found[1]), form.call)
    parts = []
    if "@call" in written:
        parts.append(("call", _of_calls(_call_schema(tools, arguments, form.key, "#"), arguments)))
    if "@list" in written:
        parts.append(("list", _of_calls(array_schema(tools, arguments, form.key, None if several else 1), arguments)))
    if "@named" in written:
        names = (
            f"{json.dumps(tool['function']['name'])} {mark('[ARGS]')}? @arguments{place}"
            for place, tool in enumerate(tools)
        )
        named = tuple((f"arguments{place}", each) for place, each in enumerate(arguments))
        parts.append(("named", Grammar("lark", f"start: {' | '.join(names)}", "tools", named)))
    more = f" ({form.between} call)*" if several else ""
    return f"calls: call{more}\ncall: {written}", parts


def answer_grammar(
    wanted: Grammar,
    thoughts: bool | None,
    token_of: TokenOf,
    form: Format | None = None,
    tools: Tools = (),
    several: bool = True,
) -> Grammar:
    """What a request wants, after the model's thoughts and beside calls in the model's own format.

    Args:
        thoughts: see `Prompt`.
        token_of: the token that the vocabulary has for a mark, if any: llguidance matches such a token by its number.
        form: the format of the calls that the answer may be instead; None: it may be none.

    Raises:
        ApiError: a function's schema cannot be used.
    """
    if thoughts is None and form is None:
        return wanted

    def mark(text: str) -> str:
        token = token_of(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    lines = ["start: before @wanted" if form is None else "start: before (@wanted | calls)"]
    parts = [("wanted", wanted)]
    if thoughts is None:
        lines.append('before: ""')
    else:
        lines.append("before: thoughts" if thoughts else f"before: ({mark(BEGIN)} thoughts)?")
        lines.append("thoughts: thought LINES" if token_of(END) is None else f"thoughts: ANY {mark(END)} LINES")
        if token_of(END) is None:
            lines.append(f"thought[suffix={json.dumps(END)}]: ANY")
        lines += [r"ANY: /(?s:.*)/", r"LINES: /\n{0,3}/"]
    if form is not None:
        rules, made = _calls(form, tools, several, mark)
        lines += [rules, r"GAP: /\s{0,4}/"]
        parts += made
    return Grammar("lark", "\n".join(lines), wanted.param, tuple(parts))
