# SPDX-License-Identifier: Apache-2.0
"""JSON schemas that requests bring: objects are closed, and what is wrong with one is named by its property."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# https://json-schema.org/draft/2020-12/json-schema-core#section-10, with the former drafts' names.
_ONE = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# Those that llguidance holds a text to, and what a text also fits: numbers end, and programs read the dates and times
# (Python has no year 0 and no leap seconds). A small model goes on as long as a format lets it.
_YEAR = r"^(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
FORMATS = {
    "date-time": _YEAR + r".{13}[0-5]\d(\.\d{1,6})?[Zz+-]",
    "time": r"^.{6}[0-5]\d(\.\d{1,6})?[Zz+-]",
    "date": _YEAR,
    "duration": r"^\D+(\d{1,4}\D+)*$",
    "email": r"^[^@]{1,64}@.{1,255}$",
    **dict.fromkeys(("hostname", "ipv4", "ipv6", "uuid", "uri")),
}
# Keywords that say which properties there may be beside those with a name.
_OPEN = {"additionalProperties", "unevaluatedProperties"}
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_MOST_TRIES = 200  # schemas that are compiled to find the one that cannot be

EMPTY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _below(schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas directly in a schema, each with where it is."""
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        if name in _ONE and isinstance(value, Mapping | bool):
            yield (name,), value
        elif name in _LISTS and isinstance(value, list):
            yield from (((name, str(place)), each) for place, each in enumerate(value))
        elif name in _MAPS and isinstance(value, Mapping):
            yield from (((name, key), each) for key, each in value.items())


def _target(root: Any, reference: Any) -> Any:
    """What a reference into the schema leads to, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and part.isdecimal() and len(part) < 9 and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def _followed(root: Any, schema: Any) -> Mapping[str, Any]:
    """The schema that a reference leads to in the end; {} where it leads to none."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _target(root, schema["$ref"])
    return schema if isinstance(schema, Mapping) else {}


def _of_same_value(root: Any, schema: Mapping[str, Any]) -> list[list[Any]]:
    """The schemas that hold for the same value as this one; those in one list are alternatives."""
    groups: list[list[Any]] = [[each] for each in _list(schema.get("allOf"))]
    groups += [[*_list(schema[name])] for name in ("anyOf", "oneOf") if name in schema]
    branches = [schema[name] for name in ("if", "then", "else") if name in schema]
    groups += [branches] if branches else []
    dependent = schema.get("dependentSchemas")
    groups += [[each] for each in dependent.values()] if isinstance(dependent, Mapping) else []
    if "$ref" in schema:
        groups.append([_target(root, schema["$ref"])])
    return groups


def _parts(root: Any, schema: Mapping[str, Any]) -> list[Any]:
    return [part for group in _of_same_value(root, schema) for part in group]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _names_properties(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema or "patternProperties" in schema


def prepare(root: Any) -> Any:
    """A copy of a schema as answers are held to it.

    An object that names properties has no others unless the schema says so, as with vLLM's
    `disable_additional_properties`: nothing else would make a small model end its object. What several schemas say of
    one object (`allOf`, alternatives beside `properties`) is closed where they are put together, with the properties of
    all of them, since each alone would forbid the others'. No grammar can hold a pattern with look-around: beside a
    format, the format is kept, and an alternative with such a pattern is left out. Nor can one hold items to be unique,
    but there are at most as many as there are values.
    """
    parts: set[int] = set()
    joining: set[int] = set()

    def mark(schema: Any) -> None:
        todo = [schema]  # no recursion, as references can be many
        while todo:
            each = todo.pop()
            if isinstance(each, Mapping) and id(each) not in parts:
                parts.add(id(each))
                todo += _parts(root, each)

    def find(schema: Any) -> None:
        if isinstance(schema, Mapping) and len(_of_same_value(root, schema)) + _names_properties(schema) > 1:
            joining.add(id(schema))
            for each in _parts(root, schema):
                mark(each)
        for _, each in _below(schema):
            find(each)

    def copied(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        made = {name: _copied_value(name, value, copied) for name, value in schema.items()}
        if not _names_properties(schema) and isinstance(schema.get("propertyNames"), Mapping):
            made |= _named_by(root, schema["propertyNames"], made.get("additionalProperties", True))
        if id(schema) not in parts:
            made |= _closing(root, schema, made, id(schema) in joining)
        if (form := _known_format(schema)) and ("pattern" not in schema or _looks_around(schema)):
            made.pop("pattern", None)
            made |= {"pattern": bound} if (bound := FORMATS[form]) else {}
        if isinstance(made.get("anyOf"), list):
            made["anyOf"] = _held(made["anyOf"])
        if schema.get("uniqueItems") is True and (count := _values(root, schema.get("items"))):
            most = schema.get("maxItems")
            made["maxItems"] = min(count, most) if isinstance(most, int) else count
        return made

    find(root)
    return copied(root)


def _known_format(schema: Mapping[str, Any]) -> str:
    """The format of a schema that an answer is held to, or ""."""
    form = schema.get("format")
    return form if isinstance(form, str) and form in FORMATS else ""


def _looks_around(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _held(alternatives: list[Any]) -> list[Any]:
    """The alternatives without those that no grammar can hold, where others than null are left.

    So a Decimal of pydantic, a number or a text with such a pattern, becomes a number.
    """
    left = [each for each in alternatives if not _looks_around(each)]
    return left if any(isinstance(each, Mapping) and each.get("type") != "null" for each in left) else alternatives


def _named_by(root: Any, names: Any, value: Any) -> dict[str, Any]:
    """The keywords for an object whose properties have these names and this value."""
    names = _followed(root, names)
    found = [names["const"]] if "const" in names else _list(names.get("enum"))
    if found:
        properties = {name: value for name in found if isinstance(name, str)}
        return {"properties": properties, "additionalProperties": False}
    pattern = names.get("pattern")
    return {"patternProperties": {pattern: value}, "additionalProperties": False} if isinstance(pattern, str) else {}


def _values(root: Any, schema: Any) -> int:
    """How many values fit a schema that lists them, 0 for any other one."""
    schema = _followed(root, schema)
    return len(_list(schema.get("enum"))) or (1 if "const" in schema else 2 if schema.get("type") == "boolean" else 0)


def _closing(root: Any, schema: Mapping[str, Any], made: Mapping[str, Any], joined: bool) -> dict[str, Any]:
    """The keywords that leave an object only the properties that it names; {} where it may have others.

    Args:
        made: the copy of the schema.
        joined: whether its parts say what properties there are, too.
    """
    found: dict[str, None] = {}
    required: set[str] = set()
    seen: set[int] = set()
    todo: list[Any] = [schema]
    while todo:
        each = todo.pop(0)
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        if _OPEN & each.keys() or (joined and "patternProperties" in each):
            return {}
        named = each.get("properties")
        found |= dict.fromkeys(named if isinstance(named, Mapping) else ())
        required |= {name for name in _list(each.get("required")) if isinstance(name, str)}
        todo += _parts(root, each) if joined else []
    if "patternProperties" in schema:
        return {"additionalProperties": False}
    if not required <= found.keys() or not (found or "properties" in schema):
        return {}
    own = made.get("properties", {})
    properties = {**dict.fromkeys(found, True), **own} if isinstance(own, Mapping) else own
    return {"properties": properties, "additionalProperties": False}


def _copied_value(name: str, value: Any, copied: Callable[[Any], Any]) -> Any:
    if name in _LISTS and isinstance(value, list):
        return [copied(each) for each in value]
    if name in _MAPS and isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    return copied(value) if name in _ONE else value


def rebase(schema: Any, where: str) -> Any:
    """A schema moved into another one at `where`: its references into itself, as #/$defs/name, are adapted."""
    if isinstance(schema, Mapping):
        return {
            name: where + value[1:]
            if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else rebase(value, where)
            for name, value in schema.items()
        }
    return [rebase(value, where) for value in schema] if isinstance(schema, list) else schema


def find_problem(root: Any, problem_of: Callable[[Any], str]) -> tuple[str, str]:
    """The property whose schema cannot be used, as in `orders[].email` ("": the whole), and why.

    Args:
        problem_of: what is wrong with a schema alone, "" where nothing is.
    """
    whole = {"schema": rebase(root, "#/$defs/schema")}
    tries = 0

    def problem_at(pointer: str) -> str:
        nonlocal tries
        tries += 1
        return "" if tries > _MOST_TRIES else problem_of({"$ref": f"#/$defs/schema{pointer}", "$defs": whole})

    path, pointer, here, said, seen = "", "", root, problem_of(root), {""}
    while True:
        steps = [(below, "".join(f"/{_escaped(part)}" for part in below), each) for below, each in _below(here)]
        places = [
            (_named(path, below), pointer + more, each)
            for below, more, each in steps
            if below[0] not in ("$defs", "definitions")
        ]
        if isinstance(here, Mapping) and isinstance(here.get("$ref"), str):
            places.append((path, here["$ref"][1:], _target(root, here["$ref"])))
        for place in places:
            if place[1] not in seen and (problem := problem_at(place[1])):
                (path, pointer, here), said = place, problem
                seen.add(pointer)
                break
        else:
            return path, said


def _named(path: str, below: tuple[str, ...]) -> str:
    if below[0] in ("properties", "patternProperties"):
        return f"{path}.{below[1]}" if path else below[1]
    return f"{path}[]" if below[0] in ("items", "prefixItems", "additionalItems") else path


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")
