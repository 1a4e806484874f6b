# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: turns the fields of requests that constrain an answer into the engine's `Grammar`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyaccel.serve.interface import Grammar
from anyaccel.serve.json_schema import prepared
from anyaccel.serve.protocol import limits
from anyaccel.serve.protocol.common import ResponseFormat, SamplingFields, StructuredOutputs
from anyaccel.serve.protocol.errors import wrong


def schema_grammar(schema: Any, param: str) -> Grammar:
    """A grammar of a JSON schema that a request brings.

    Raises:
        ApiError: it is too large, too deep, or points out of itself.
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
    text = json.dumps(prepared(schema), ensure_ascii=False)
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


def depth_of(value: Any) -> int:
    """The depth to which objects and lists are nested."""
    return max(depth for depth, _, _ in _walk(value))


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """A grammar for exactly one of these texts. JSON strings are Lark strings, except for a bare DEL."""
    texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return Grammar("lark", "start: " + " | ".join(texts), param)


def response_grammar(wanted: ResponseFormat | None, param: str = "response_format") -> Grammar | None:
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


def _outputs_grammar(wanted: StructuredOutputs | None) -> Iterator[Grammar]:
    if wanted is None:
        return
    if wanted.json_value is not None:
        yield schema_grammar(wanted.json_value, "structured_outputs.json")
    if wanted.json_object:
        yield Grammar("json_object", param="structured_outputs.json_object")
    if wanted.regex is not None:
        yield Grammar("regex", wanted.regex, "structured_outputs.regex")
    if wanted.choice is not None:
        yield choice_grammar(wanted.choice, "structured_outputs.choice")
    if wanted.grammar is not None:
        yield Grammar("lark", wanted.grammar, "structured_outputs.grammar")


def grammar_of(request: SamplingFields) -> Grammar | None:
    """The one constraint that a request has, if it has any.

    Raises:
        ApiError: it has several, or one that cannot be used.
    """
    found = list(_outputs_grammar(request.structured_outputs))
    if (of_format := response_grammar(request.response_format)) is not None:
        found.append(of_format)
    if request.guided_json is not None:
        found.append(schema_grammar(request.guided_json, "guided_json"))
    if request.guided_regex is not None:
        found.append(Grammar("regex", request.guided_regex, "guided_regex"))
    if request.guided_choice is not None:
        found.append(choice_grammar(request.guided_choice, "guided_choice"))
    if request.guided_grammar is not None:
        found.append(Grammar("lark", request.guided_grammar, "guided_grammar"))
    if len(found) > 1:
        raise wrong(
            "structured_outputs" if of_format is None else "response_format",
            "only one of response_format, structured_outputs and guided_* can say what an answer looks like",
        )
    return found[0] if found else None
