# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of requests: prepared for llguidance, and searched for the property that it cannot use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# https://json-schema.org/draft/2020-12/json-schema-core#section-10, with the former drafts' names.
_SCHEMA_KEYWORDS = (
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# Formats that llguidance enforces, each with a pattern that a text also has to match: so numbers are bounded, and
# programs can read the dates and times (Python has no year 0 and no leap seconds). A small model writes on as long as a
# format lets it.
_YEAR = r"^(\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
FORMATS = {
    "date-time": _YEAR + r".{13}[0-5]\d(\.\d{1,6})?[Zz+-]",
    "time": r"^.{6}[0-5]\d(\.\d{1,6})?[Zz+-]",
    "date": _YEAR,
    "duration": r"^\D+(\d{1,4}\D+)*$",
    "email": r"^[^@]{1,64}@.{1,255}$",
    **dict.fromkeys(("hostname", "ipv4", "ipv6", "uuid", "uri")),
}
# Keywords about properties without a name.
_ALLOW_OTHERS = {"additionalProperties", "unevaluatedProperties"}
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_MOST_COMPILATIONS = 200  # of parts of a schema, to find the one that cannot be compiled

EMPTY_OBJECT: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _subschemas(schema: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas directly in a schema, each with its path."""
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        if name in _SCHEMA_KEYWORDS and isinstance(value, Mapping | bool):
            yield (name,), value
        elif name in _LIST_KEYWORDS and isinstance(value, list):
            yield from (((name, str(place)), each) for place, each in enumerate(value))
        elif name in _MAP_KEYWORDS and isinstance(value, Mapping):
            yield from (((name, key), each) for key, each in value.items())


def _resolve(root: Any, reference: Any) -> Any:
    """The schema that a reference into the schema names, or None."""
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


def _follow(root: Any, schema: Any) -> Mapping[str, Any]:
    """The schema after following references; {} if there is none."""
    for _ in range(8):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _resolve(root, schema["$ref"])
    return schema if isinstance(schema, Mapping) else {}


def _in_place_groups(root: Any, schema: Mapping[str, Any]) -> list[list[Any]]:
    """The schemas that apply to the same value as this one; those in one list are alternatives.

    JSON Schema calls their keywords in-place applicators.
    """
    groups: list[list[Any]] = [[each] for each in _list(schema.get("allOf"))]
    groups += [[*_list(schema[name])] for name in ("anyOf", "oneOf") if name in schema]
    branches = [schema[name] for name in ("if", "then", "else") if name in schema]
    groups += [branches] if branches else []
    dependent = schema.get("dependentSchemas")
    groups += [[each] for each in dependent.values()] if isinstance(dependent, Mapping) else []
    if "$ref" in schema:
        groups.append([_resolve(root, schema["$ref"])])
    return groups


def _in_place_schemas(root: Any, schema: Mapping[str, Any]) -> list[Any]:
    return [part for group in _in_place_groups(root, schema) for part in group]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _names_properties(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema or "patternProperties" in schema


def prepare(root: Any) -> Any:
    """A copy of a schema, as answers have to follow it.

    An object that names properties has no others unless the schema allows them, as with vLLM's
    `disable_additional_properties`: nothing else would make a small model end its object. Where several schemas apply
    to one object (`allOf`, alternatives beside `properties`), the schema that combines them is closed, with the
    properties of all of them, since each alone would forbid the others'. No grammar has patterns with look-around:
    beside a format, the format counts, and an alternative with such a pattern is left out. Nor can a grammar make items
    unique, but there are at most as many as there are values.
    """
    in_place: set[int] = set()
    combined: set[int] = set()

    def mark(schema: Any) -> None:
        todo = [schema]  # no recursion, as there may be many references
        while todo:
            each = todo.pop()
            if isinstance(each, Mapping) and id(each) not in in_place:
                in_place.add(id(each))
                todo += _in_place_schemas(root, each)

    def find(schema: Any) -> None:
        if isinstance(schema, Mapping) and len(_in_place_groups(root, schema)) + _names_properties(schema) > 1:
            combined.add(id(schema))
            for each in _in_place_schemas(root, schema):
                mark(each)
        for _, each in _subschemas(schema):
            find(each)

    def copy(schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        made = {name: _copy_value(name, value, copy) for name, value in schema.items()}
        if not _names_properties(schema) and isinstance(schema.get("propertyNames"), Mapping):
            made |= _from_property_names(root, schema["propertyNames"], made.get("additionalProperties", True))
        if id(schema) not in in_place:
            made |= _closed(root, schema, made, id(schema) in combined)
        if (form := _known_format(schema)) and ("pattern" not in schema or _looks_around(schema)):
            made.pop("pattern", None)
            made |= {"pattern": bound} if (bound := FORMATS[form]) else {}
        if isinstance(made.get("anyOf"), list):
            made["anyOf"] = _supported(made["anyOf"])
        if schema.get("uniqueItems") is True and (count := _count_values(root, schema.get("items"))):
            most = schema.get("maxItems")
            made["maxItems"] = min(count, most) if isinstance(most, int) else count
        return made

    find(root)
    return copy(root)


def _known_format(schema: Mapping[str, Any]) -> str:
    """The format of a schema if llguidance enforces it, or ""."""
    form = schema.get("format")
    return form if isinstance(form, str) and form in FORMATS else ""


def _looks_around(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _supported(alternatives: list[Any]) -> list[Any]:
    """The alternatives without those that have look-around, if others than null are left.

    So a Decimal of pydantic, a number or a text with such a pattern, becomes a number.
    """
    kept = [each for each in alternatives if not _looks_around(each)]
    return kept if any(isinstance(each, Mapping) and each.get("type") != "null" for each in kept) else alternatives


def _from_property_names(root: Any, names: Any, value: Any) -> dict[str, Any]:
    """The keywords for an object whose properties have these names and this value."""
    names = _follow(root, names)
    listed = [names["const"]] if "const" in names else _list(names.get("enum"))
    if listed:
        properties = {name: value for name in listed if isinstance(name, str)}
        return {"properties": properties, "additionalProperties": False}
    pattern = names.get("pattern")
    return {"patternProperties": {pattern: value}, "additionalProperties": False} if isinstance(pattern, str) else {}


def _count_values(root: Any, schema: Any) -> int:
    """The number of values of a schema that lists them; 0 for any other schema."""
    schema = _follow(root, schema)
    return len(_list(schema.get("enum"))) or (1 if "const" in schema else 2 if schema.get("type") == "boolean" else 0)


def _closed(root: Any, schema: Mapping[str, Any], made: Mapping[str, Any], is_combined: bool) -> dict[str, Any]:
    """The keywords that leave an object only the properties that it names; {} where it may have others.

    Args:
        made: the copy of the schema.
        is_combined: whether other schemas that apply to the object name properties, too.
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
        if _ALLOW_OTHERS & each.keys() or (is_combined and "patternProperties" in each):
            return {}
        named = each.get("properties")
        found |= dict.fromkeys(named if isinstance(named, Mapping) else ())
        required |= {name for name in _list(each.get("required")) if isinstance(name, str)}
        todo += _in_place_schemas(root, each) if is_combined else []
    if "patternProperties" in schema:
        return {"additionalProperties": False}
    if not required <= found.keys() or not (found or "properties" in schema):
        return {}
    own = made.get("properties", {})
    properties = {**dict.fromkeys(found, True), **own} if isinstance(own, Mapping) else own
    return {"properties": properties, "additionalProperties": False}


def _copy_value(name: str, value: Any, copy: Callable[[Any], Any]) -> Any:
    if name in _LIST_KEYWORDS and isinstance(value, list):
        return [copy(each) for each in value]
    if name in _MAP_KEYWORDS and isinstance(value, Mapping):
        return {key: copy(each) for key, each in value.items()}
    return copy(value) if name in _SCHEMA_KEYWORDS else value


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


def find_problem(root: Any, compile: Callable[[Any], str]) -> tuple[str, str]:
    """The property whose schema cannot be used, such as `orders[].email` ("": all of it), and why.

    Args:
        compile: returns the problem with a schema alone, or "".
    """
    definitions = {"schema": rebase(root, "#/$defs/schema")}
    path, pointer, schema, problem = "", "", root, compile(root)
    seen = {pointer}
    compilations = 0
    while True:
        for inner_path, inner_pointer, inner in _steps(root, schema, path, pointer):
            compilations += 1
            if inner_pointer in seen or compilations > _MOST_COMPILATIONS:
                continue
            alone = {"$ref": f"#/$defs/schema{inner_pointer}", "$defs": definitions}
            if inner_problem := compile(alone):
                path, pointer, schema, problem = inner_path, inner_pointer, inner, inner_problem
                seen.add(pointer)
                break
        else:
            return path, problem


def _steps(root: Any, schema: Any, path: str, pointer: str) -> Iterator[tuple[str, str, Any]]:
    """The schemas in a schema, or that it refers to: each one's path of properties, its JSON pointer, and itself."""
    for keys, inner in _subschemas(schema):
        if keys[0] not in ("$defs", "definitions"):
            steps = (key.replace("~", "~0").replace("/", "~1") for key in keys)
            yield _property_path(path, keys), "/".join([pointer, *steps]), inner
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        yield path, schema["$ref"][1:], _resolve(root, schema["$ref"])


def _property_path(path: str, keys: tuple[str, ...]) -> str:
    if keys[0] in ("properties", "patternProperties"):
        return f"{path}.{keys[1]}" if path else keys[1]
    return f"{path}[]" if keys[0] in ("items", "prefixItems", "additionalItems") else path
