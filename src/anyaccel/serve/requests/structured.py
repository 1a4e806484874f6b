# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: from the fields of a request to the grammar of its whole answer.

The answer may begin with the model's reasoning, and may be tool calls instead of what the request asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anyaccel.serve.interface import Grammar
from anyaccel.serve.json_schema import EMPTY_OBJECT, prepare, rebase
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import ResponseFormat, SamplingFields, StructuredOutputs
from anyaccel.serve.protocol.errors import wrong
from anyaccel.serve.requests.reasoning import BEGIN, END
from anyaccel.serve.requests.tools.format import ToolFormat

ToolDescriptions = Sequence[Mapping[str, Any]]
Mark = Callable[[str], str]


# Fields of a request --------------------------------------------------------------------------------------


def request_grammar(request: SamplingFields) -> Grammar | None:
    """The one constraint that a request has, if it has any.

    Raises:
        ApiError: it has several, or one that cannot be used.
    """
    guided = StructuredOutputs.model_construct(
        json_value=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    found = [
        *_outputs_grammars(request.structured_outputs, "structured_outputs."),
        *_outputs_grammars(guided, "guided_"),
    ]
    response_format = response_format_grammar(request.response_format)
    if response_format is not None:
        found.append(response_format)
    if len(found) > 1:
        raise wrong(
            "structured_outputs" if response_format is None else "response_format",
            "only one of response_format, structured_outputs and guided_* can say what an answer looks like",
        )
    return found[0] if found else None


def _outputs_grammars(outputs: StructuredOutputs | None, prefix: str) -> Iterator[Grammar]:
    if outputs is None:
        return
    if outputs.json_value is not None:
        yield schema_grammar(outputs.json_value, f"{prefix}json")
    if outputs.json_object:
        yield Grammar("json_object", param=f"{prefix}json_object")
    if outputs.regex is not None:
        yield Grammar("regex", outputs.regex, f"{prefix}regex")
    if outputs.choice is not None:
        yield choice_grammar(outputs.choice, f"{prefix}choice")
    if outputs.grammar is not None:
        yield Grammar("lark", outputs.grammar, f"{prefix}grammar")


def response_format_grammar(wanted: ResponseFormat | None, param: str = "response_format") -> Grammar | None:
    """The grammar of OpenAI's field `response_format`.

    Raises:
        ApiError: json_schema is missing or cannot be used.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" and wanted.object_schema is not None:
        return schema_grammar(wanted.object_schema, f"{param}.schema")
    if wanted.type == "json_object":
        return Grammar("json_object", param=param)
    if wanted.json_schema is None or wanted.json_schema.json_schema is None:
        raise wrong(f"{param}.json_schema", "is required, with the schema in its field schema")
    return schema_grammar(wanted.json_schema.json_schema, f"{param}.json_schema.schema")


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """A grammar for exactly one of these texts. JSON strings are Lark strings, except for a bare DEL."""
    texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return Grammar("lark", "start: " + " | ".join(texts), param)


def schema_grammar(schema: Any, param: str) -> Grammar:
    """A grammar of a JSON schema from a request.

    Raises:
        ApiError: it is too large, too deep, or refers to something outside itself.
    """
    if isinstance(schema, str):
        if len(schema) > limits.MOST_SCHEMA:
            raise wrong(param, f"the schema has more than {limits.MOST_SCHEMA} characters")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise wrong(param, f"the schema is no JSON ({error})") from None
    if not isinstance(schema, Mapping | bool):
        raise wrong(param, "the schema must be an object")
    for depth, key, value in _walk(schema):
        if depth > limits.MOST_DEPTH:
            raise wrong(param, f"the schema is nested more than {limits.MOST_DEPTH} deep")
        # A reference to another document would have to be fetched.
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise wrong(param, "$ref must point into the schema itself, as in #/$defs/name")
    text = json.dumps(prepare(schema), ensure_ascii=False)
    if len(text) > limits.MOST_SCHEMA:
        raise wrong(param, f"the schema has more than {limits.MOST_SCHEMA} characters")
    return Grammar("json_schema", text, param)


def _walk(value: Any) -> Iterator[tuple[int, str | None, Any]]:
    """Each value with its depth and its name, without recursion, as a client chooses the depth."""
    todo: list[tuple[int, str | None, Any]] = [(0, None, value)]
    while todo:
        depth, key, value = todo.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            todo += [(depth + 1, name, each) for name, each in value.items()]
        elif isinstance(value, list):
            todo += [(depth + 1, None, each) for each in value]


def nesting_depth(value: Any) -> int:
    """The depth to which objects and lists are nested."""
    return max(depth for depth, _, _ in _walk(value))


# Tool calls -----------------------------------------------------------------------------------------------


def parameter_grammars(tools: ToolDescriptions) -> list[Grammar]:
    """The arguments of each function; a function without parameters has none, as with OpenAI.

    Raises:
        ApiError: a schema cannot be used.
    """
    found = []
    for place, tool in enumerate(tools):
        param, schema = f"tools[{place}].function.parameters", tool["function"].get("parameters") or EMPTY_OBJECT
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise wrong(
                param, f"type is {json.dumps(kind)[:40]}: arguments are an object; put it into one of its properties"
            )
        found.append(schema_grammar(schema, param))
    return found


def required_calls(tools: ToolDescriptions, most: int | None) -> Grammar:
    """A JSON list of at least one call.

    Raises:
        ApiError: a schema cannot be used.
    """
    arguments = parameter_grammars(tools)
    return _calls_grammar(call_array_schema(tools, arguments, "parameters", most), arguments)


def _calls_grammar(schema: dict[str, Any], arguments: Sequence[Grammar]) -> Grammar:
    return replace(schema_grammar(schema, "tools"), parts=tuple(("", each) for each in arguments))


def call_array_schema(
    tools: ToolDescriptions, arguments: Sequence[Grammar], key: str, most: int | None
) -> dict[str, Any]:
    """The schema of a list of at least one call of these functions."""
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": _call_schema(tools, arguments, key, "#/items")}
    return schema if most is None else {**schema, "maxItems": most}


def _call_schema(tools: ToolDescriptions, arguments: Sequence[Grammar], key: str, where: str) -> dict[str, Any]:
    """The schema of one call.

    Args:
        key: the property that has the call's arguments.
        where: a JSON pointer to the place at which the caller inserts this schema.
    """
    where += "" if len(tools) == 1 else "/anyOf/{}"
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool["function"]["name"]]},
                key: rebase(json.loads(schema.text), f"{where.format(place)}/properties/{key}"),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for place, (tool, schema) in enumerate(zip(tools, arguments, strict=True))
    ]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _call_rules(
    form: ToolFormat, tools: ToolDescriptions, several: bool, mark: Mark
) -> tuple[str, list[tuple[str, Grammar]]]:
    """The rule `calls` of a format, and the grammars that it names."""
    arguments = parameter_grammars(tools)
    rule = re.sub("‹(.+?)›", lambda found: mark(found[1]), form.grammar)
    parts = []
    if "@call" in rule:
        parts.append(("call", _calls_grammar(_call_schema(tools, arguments, form.arguments, "#"), arguments)))
    if "@list" in rule:
        schema = call_array_schema(tools, arguments, form.arguments, None if several else 1)
        parts.append(("list", _calls_grammar(schema, arguments)))
    if "@named" in rule:
        names = (
            f"{json.dumps(tool['function']['name'])} {mark('[ARGS]')}? @arguments{place}"
            for place, tool in enumerate(tools)
        )
        named = tuple((f"arguments{place}", each) for place, each in enumerate(arguments))
        parts.append(("named", Grammar("lark", f"start: {' | '.join(names)}", "tools", named)))
    more = f" ({form.separator} call)*" if several else ""
    return f"calls: call{more}\ncall: {rule}", parts


# The whole answer -----------------------------------------------------------------------------------------


def answer_grammar(
    wanted: Grammar,
    reasoning: bool | None,
    token_id: Callable[[str], int | None],
    form: ToolFormat | None = None,
    tools: ToolDescriptions = (),
    several: bool = True,
) -> Grammar:
    """What a request asks for, after the model's reasoning and beside calls in the model's own format.

    Args:
        reasoning: see `Prompt`.
        token_id: the token that the vocabulary has for a mark, if any: llguidance matches such a token by its number.
        form: the format of the calls that the answer may be instead; None: it may be none.

    Raises:
        ApiError: a function's schema cannot be used.
    """
    if reasoning is None and form is None:
        return wanted

    def mark(text: str) -> str:
        token = token_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    lines = ["start: before @wanted" if form is None else "start: before (@wanted | calls)"]
    parts = [("wanted", wanted)]
    if reasoning is None:
        lines.append('before: ""')
    else:
        lines.append("before: thoughts" if reasoning else f"before: ({mark(BEGIN)} thoughts)?")
        lines.append("thoughts: thought LINES" if token_id(END) is None else f"thoughts: ANY {mark(END)} LINES")
        if token_id(END) is None:
            lines.append(f"thought[suffix={json.dumps(END)}]: ANY")
        lines += [r"ANY: /(?s:.*)/", r"LINES: /\n{0,3}/"]
    if form is not None:
        rules, made = _call_rules(form, tools, several, mark)
        lines += [rules, r"GAP: /\s{0,4}/"]
        parts += made
    return Grammar("lark", "\n".join(lines), wanted.param, tuple(parts))
