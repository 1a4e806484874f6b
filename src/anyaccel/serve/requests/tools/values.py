# SPDX-License-Identifier: Apache-2.0
"""Arguments that models write as text: the values that a function's schema makes of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

_PYTHON = {"None": None, "True": True, "False": False}
_MOST_STEPS = 256


def resolve(root: Any, schema: Any) -> Any:
    """The schema that a schema refers to, in the end."""
    for _ in range(_MOST_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for key in reference[1:].split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping):
                schema = schema.get(key)
            elif isinstance(schema, Sequence) and not isinstance(schema, str) and key.isdigit() and len(key) < 6:
                schema = schema[int(key)] if int(key) < len(schema) else None
            else:
                return None
    return None


def properties_of(root: Any) -> Mapping[str, Any]:
    """The properties that a function's arguments have by name."""
    schema = resolve(root, root)
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(root: Any, schema: Any) -> frozenset[str]:
    """The types that a value may have, with JSON schema's names; none: any."""
    found: set[str] = set()
    todo = [schema]
    for _ in range(_MOST_STEPS):
        if not todo:
            break
        each = resolve(root, todo.pop())
        if not isinstance(each, Mapping):
            continue
        kind = each.get("type")
        found |= {kind} if isinstance(kind, str) else {name for name in kind or () if isinstance(name, str)}
        if kind is None:
            values = [*(each.get("enum") or ()), *([each["const"]] if "const" in each else ())]
            found |= {type_of(value) for value in values}
            for name in ("anyOf", "oneOf", "allOf"):
                todo += each.get(name) or ()
    return frozenset(found)


def type_of(value: Any) -> str:
    """The type of a value, with JSON schema's name."""
    for kinds, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kinds):
            return name
    return "null" if value is None else "object"


def typed_value(text: str, root: Any, name: str) -> Any:
    """The value of the argument `name` that a model has written as a text without quotes.

    A text stays one where its schema has it, unless it is a value of another type that the schema has, too.
    """
    kinds = types_of(root, properties_of(root).get(name))
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)  # Python reads numbers that are not finite, too
    except (ValueError, RecursionError):
        value = _python_value(text) if kinds & {"object", "array"} else _PYTHON.get(text.strip(), text)
    kind = type_of(value)
    if "string" not in kinds or kind in kinds or (kind == "integer" and "number" in kinds):
        return value
    return text


def _python_value(text: str) -> Any:
    """The value that a model has written in Python; the text itself where it is none, or none of JSON."""
    try:
        value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text
