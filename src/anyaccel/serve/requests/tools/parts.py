# SPDX-License-Identifier: Apache-2.0
"""The parts that formats of tool calls consist of."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.serve.interface import Grammar
from anyaccel.serve.json_schema import rebase
from anyaccel.serve.requests.tools.format import (
    FAIL,
    MORE,
    Found,
    Function,
    ParsedCall,
    Rules,
    lark_text,
    match_text,
    skip,
    to_json,
    walk_calls,
)
from anyaccel.serve.requests.tools.values import properties_of, resolve, type_of, typed_value, types_of

_WORD = re.compile(r"[\w.\-]+")
# Texts in quotes, brackets, and what is between them; a quote alone is the beginning of a text that is not complete.
_JSON = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{}\]]|[^"\[\]{}]+|"', re.DOTALL)
_PYTHON = re.compile(
    r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'|[\[({})\]]|[^"'\[\](){}]+|["']""", re.DOTALL
)
_HEAD = re.compile(r'\s*\{\s*"(?:tool_)?name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMES = {"true": True, "false": False, "null": None}


def balanced(text: str, place: int, tokens: re.Pattern[str] = _JSON) -> int:
    """The end of a value in brackets, or MORE; FAIL where none begins."""
    depth = 0
    while place < len(text):
        found = tokens.match(text, place)
        assert found is not None
        token, place = found[0], found.end()
        if token in ("'", '"'):
            return MORE
        if token in ("{", "[", "("):
            depth += 1
        elif token in ("}", "]", ")"):
            depth -= 1
        elif not depth:
            return FAIL
        if depth <= 0:
            return place if depth == 0 else FAIL
    return MORE


def load(text: str) -> Any:
    """The value of JSON, or None; line breaks in texts count, as models write them."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def load_object(text: str) -> str | None:
    """The JSON of an object that a model has written, or None."""
    value = load(text)
    try:
        return to_json(value) if isinstance(value, dict) else None
    except ValueError:
        return None


@dataclass(frozen=True)
class Name:
    """The function's name."""

    whole = False

    def match(self, text: str, place: int, found: Found) -> int:
        word = _WORD.match(text, skip(text, place))
        if word is None:
            return MORE if skip(text, place) == len(text) else FAIL
        found.name = word[0]
        return MORE if word.end() == len(text) else word.end()

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        return lark_text(functions[0].name)


@dataclass(frozen=True)
class Word:
    """A word that the model writes beside a call: its number, or its id.

    Args:
        pattern: what it may be, in a grammar.
        is_identity: whether it is the id.
    """

    pattern: str = r"\d{1,6}"
    is_identity: bool = False
    whole = False

    def match(self, text: str, place: int, found: Found) -> int:
        word = _WORD.match(text, skip(text, place))
        if word is None:
            return MORE if skip(text, place) == len(text) else FAIL
        if self.is_identity:
            found.identity = word[0]
        return MORE if word.end() == len(text) else word.end()

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        return f"/{self.pattern}/"


@dataclass(frozen=True)
class Arguments:
    """The arguments as a JSON object."""

    whole = False

    def match(self, text: str, place: int, found: Found) -> int:
        place = skip(text, place)
        if place == len(text):
            return MORE
        if text[place] != "{":
            return FAIL
        found.begun = place
        end = balanced(text, place)
        if end < 0:
            return end
        found.arguments = load_object(text[place:end])
        if found.arguments is None:
            return FAIL
        found.ended = end
        return end

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        return rules.part(functions[0].arguments)


@dataclass(frozen=True)
class Json:
    """A JSON object with name and arguments, or a list of them.

    Args:
        is_list: which of them a grammar writes; both are read.
        name, arguments: their names.
        number: the name of the call's number, which comes before them; "": it has none.
    """

    is_list: bool = False
    name: str = "name"
    arguments: str = "arguments"
    number: str = ""

    @property
    def whole(self) -> bool:
        return self.is_list

    def match(self, text: str, place: int, found: Found) -> int:
        place = skip(text, place)
        if place < len(text) and text[place] not in "{[":
            return FAIL
        if (head := _HEAD.match(text, place)) is not None:
            found.name, found.begun = head[1], head.end()
            inner = balanced(text, head.end())
            if inner < 0:  # the arguments are incomplete, and so is what they are in
                return inner
            found.ended = inner
        end = balanced(text, place)
        if end < 0:
            return end
        calls = [*walk_calls(load(text[place:end]))]
        if not calls or None in calls:
            return FAIL
        found.calls += [call for call in calls if call is not None]
        return end

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        schema: dict[str, Any]
        if self.is_list:
            items = self._schema(functions, "#/items")
            schema = {"type": "array", "minItems": 1, "items": items, **({} if several else {"maxItems": 1})}
        else:
            schema = self._schema(functions, "#")
        # Its parts name the function and the property in an error.
        parts = tuple(("", function.arguments) for function in functions)
        return rules.part(Grammar("json_schema", json.dumps(schema, ensure_ascii=False), "tools", parts))

    def _schema(self, functions: Sequence[Function], where: str) -> dict[str, Any]:
        where += "" if len(functions) == 1 else "/anyOf/{}"
        schemas = [
            {
                "type": "object",
                "properties": {
                    **({self.number: {"type": "string", "pattern": "^[0-9]{1,3}$"}} if self.number else {}),
                    self.name: {"type": "string", "enum": [function.name]},
                    self.arguments: rebase(function.schema, f"{where.format(place)}/properties/{self.arguments}"),
                },
                "required": [*filter(None, (self.number,)), self.name, self.arguments],
                "additionalProperties": False,
            }
            for place, function in enumerate(functions)
        ]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def argument_grammar(function: Function, name: str) -> Grammar:
    """The grammar of one argument as JSON."""
    pointer = name.replace("~", "~0").replace("/", "~1")
    schema = {
        "$ref": f"#/$defs/arguments/properties/{pointer}",
        "$defs": {"arguments": rebase(function.schema, "#/$defs/arguments")},
    }
    text = json.dumps(schema, ensure_ascii=False)
    return Grammar("json_schema", text, function.arguments.param, (("", function.arguments),))


def arguments_of(function: Function) -> list[tuple[str, bool]]:
    """The arguments of a function by name, and whether they are required."""
    schema = resolve(function.schema, function.schema)
    required = schema.get("required") or () if isinstance(schema, dict) else ()
    return [(name, name in required) for name in properties_of(function.schema)]


def texts_of(root: Any, schema: Any) -> list[str]:
    """The texts that an argument may be, if its schema lists them."""
    schema = resolve(root, schema)
    listed = schema.get("enum") or ([schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    return (
        [each for each in listed if isinstance(each, str)] if {type_of(each) for each in listed} == {"string"} else []
    )


@dataclass(frozen=True)
class Parameters:
    """Arguments of which each is between marks; texts have no quotes.

    Args:
        begin, middle, end: what is before the name of an argument, between it and its value, and after that. A line
            break beside the value is exactly one, unlike elsewhere.
        close: what ends the arguments.
        json_middle: what stands for `middle` where the value is JSON; "": the function's schema says which are.
    """

    begin: str
    middle: str
    end: str
    close: str
    json_middle: str = ""
    whole = False

    def match(self, text: str, place: int, found: Found) -> int:
        root = found.schemas.get(found.name)
        values: dict[str, Any] = {}
        middles = [each for each in (self.middle, self.json_middle) if each]
        while True:
            if (begun := match_text(text, place, self.begin)) < 0:
                closed = match_text(text, place, self.close)
                if closed >= 0:
                    found.arguments = to_json(values)
                return MORE if closed == FAIL and begun == MORE else closed
            places = [(at, each) for each in middles if (at := text.find(each.split("\n")[0], begun)) >= 0]
            if not places:
                return MORE
            named, middle = min(places)
            name, value_place = text[begun:named].strip(), match_text(text, named, middle)
            if self.json_middle and '"' in name:
                return FAIL
            if value_place < 0:
                return value_place
            ended = text.find(self.end.strip(), value_place)
            if ended < 0:
                return MORE
            value = text[value_place:ended]
            # The line breaks of the marks may be missing.
            if self.middle.endswith("\n"):
                value = value.removeprefix("\n")
            if self.end.startswith("\n"):
                value = value.removesuffix("\n")
            values[name] = self._value(value, middle, root, name)
            place = ended + len(self.end.strip())

    def _value(self, text: str, middle: str, root: Any, name: str) -> Any:
        """The value that a text is; small models mark numbers as texts, and texts as JSON."""
        if self.json_middle:
            kinds = types_of(root, properties_of(root).get(name))
            if middle == self.middle and (not kinds or "string" in kinds):
                return text
            if middle == self.json_middle and load_object(f'{{"value": {text}}}') is not None:
                return load(text)
        return typed_value(text, root, name)

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        (function,) = functions
        members = [(self._argument(rules, function, name), required) for name, required in arguments_of(function)]
        made = rules.members(members)
        if not members and function.schema.get("additionalProperties") is not False:
            any_name = f'{rules.text(self.begin)} /[^<>"]+/ {self._middle(rules, self.middle)}'
            made = f"{rules.rule(f'{any_name} {rules.until(self._end)} GAP')}*"
        return f"{made} {rules.text(self.close)}"

    @staticmethod
    def _middle(rules: Rules, middle: str) -> str:
        return f"{rules.text(middle.rstrip())} {rules.mark(middle[len(middle.rstrip()) :])}"

    @property
    def _end(self) -> str:
        return self.end.rstrip("\n")

    def _argument(self, rules: Rules, function: Function, name: str) -> str:
        root = function.schema
        schema = properties_of(root)[name]
        kinds, middle = types_of(root, schema), self.middle
        if texts := texts_of(root, schema):
            value = f"({' | '.join(map(lark_text, texts))}) {rules.mark(self._end)}"
        elif "string" in kinds or not kinds:
            value = rules.until(self._end)
        else:
            middle = self.json_middle or middle
            value = f"{rules.part(argument_grammar(function, name))} {rules.mark(self._end)}"
        begin = f"{rules.text(self.begin)} {lark_text(name)} {self._middle(rules, middle)}"
        return rules.rule(f"{begin} {value} GAP")


@dataclass(frozen=True)
class PythonCalls:
    """Calls in Python: a list as `[weather(city="Oslo"), clock()]`, or each on a line of its own.

    Args:
        end: what comes after calls on lines; "": they are a list.
    """

    end: str = ""
    whole = True

    def match(self, text: str, place: int, found: Found) -> int:
        return self._match_lines(text, place, found) if self.end else self._match_list(text, place, found)

    def _match_list(self, text: str, place: int, found: Found) -> int:
        place = skip(text, place)
        if place < len(text) and text[place] != "[":
            return FAIL
        # What cannot be a call is found out early, as an answer may begin with [ too.
        word = re.match(r"\[\s*([A-Za-z_][\w.]*\s*(\()?)?", text[place:])
        if word is None:
            return MORE
        if word[2] is None and place + word.end() < len(text):
            return FAIL
        end = balanced(text, place, _PYTHON)
        if end < 0:
            return end
        calls = _python_calls(text[place:end])
        found.calls += calls or ()
        return end if calls else FAIL

    def _match_lines(self, text: str, place: int, found: Found) -> int:
        while True:
            place = skip(text, place)
            if found.calls and text.startswith(self.end, place):
                return place
            name = re.compile(r"[A-Za-z_][\w.]*\s*").match(text, place)
            if name is None:
                return MORE if self.end.startswith(text[place:]) else FAIL
            if name.end() == len(text):
                return MORE
            end = balanced(text, name.end(), _PYTHON) if text[name.end()] == "(" else FAIL
            if end < 0:
                return end
            calls = _python_calls(f"[{text[place:end]}]")
            if not calls:
                return FAIL
            found.calls += calls
            place = end

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        calls = []
        for function in functions:
            members = [
                (f'{lark_text(name)} "=" {rules.part(argument_grammar(function, name))}', required)
                for name, required in arguments_of(function)
            ]
            made = rules.members(members, '", "') if members else ""
            calls.append(f'{lark_text(function.name)} "(" {made} ")"')
        call = rules.rule(" | ".join(calls))
        separator = lark_text("\n" if self.end else ", ")
        more = f" ({separator} {call})*" if several else ""
        return f"{call}{more}" if self.end else f'"[" {call}{more} "]"'


def _python_calls(text: str) -> list[ParsedCall]:
    """The calls in a list; none where it has anything else."""
    try:
        tree = ast.parse(text, mode="eval").body
        return [_python_call(each) for each in tree.elts] if isinstance(tree, ast.List) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> ParsedCall:
    """A call with keyword arguments.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with keyword arguments")
    values = {str(each.arg): _python_value(each.value) for each in node.keywords}
    return ParsedCall(ast.unparse(node.func), to_json(values))


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_python_value(part) for part in parts]
        case ast.Dict(keys=keys, values=parts):
            return {str(_python_value(key)): _python_value(part) for key, part in zip(keys, parts, strict=True) if key}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"{value!r} is no JSON")
    return value


@dataclass(frozen=True)
class Quoted:
    """An object whose texts are between marks instead of quotes, and whose names have none: {city:<q>Oslo<q>}.

    Args:
        quote: the mark.
    """

    quote: str
    whole = False

    def match(self, text: str, place: int, found: Found) -> int:
        quote = re.escape(self.quote)
        tokens = re.compile(rf"{quote}.*?{quote}|[\[{{}}\]]|[^\[\]{{}}<]+|<", re.DOTALL)
        place = skip(text, place)
        if place < len(text) and text[place] != "{":
            return FAIL
        made, depth = "", 0
        while place < len(text):
            token = tokens.match(text, place)
            assert token is not None
            piece, place = token[0], token.end()
            if piece == "<" and self.quote.startswith(text[place - 1 :][: len(self.quote)]):
                return MORE
            if piece.startswith(self.quote) and len(piece) > 1:
                made += json.dumps(piece[len(self.quote) : -len(self.quote)], ensure_ascii=False)
                continue
            depth += (piece in ("{", "[")) - (piece in ("}", "]"))
            piece = re.sub(r'([^\s,:"\[\]{}]+)(?=\s*:)', lambda word: json.dumps(word[1]), piece)
            made += re.sub(r"(?<=\d)\.(?!\d)", ".0", piece)
            if not depth:
                found.arguments = self._typed(made, found)
                return FAIL if found.arguments is None else place
        return MORE

    @staticmethod
    def _typed(text: str, found: Found) -> str | None:
        """The JSON of arguments; small models write numbers as texts, too."""
        written = load_object(text)
        root = found.schemas.get(found.name)
        if written is None or root is None:
            return written
        values = json.loads(written)
        kinds = {name: types_of(root, schema) for name, schema in properties_of(root).items()}
        return to_json(
            {
                name: typed_value(value, root, name) if isinstance(value, str) and kinds.get(name) else value
                for name, value in values.items()
            }
        )

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        (function,) = functions
        return self._object(rules, function.schema, function.schema, 0)

    def _object(self, rules: Rules, root: Any, schema: Any, depth: int) -> str:
        schema = resolve(root, schema)
        required = schema.get("required") or ()
        members = [
            (f"{lark_text(f'{name}:')} {self._value(rules, root, each, depth + 1)}", name in required)
            for name, each in (schema.get("properties") or {}).items()
        ]
        return f'"{{" {rules.members(members, lark_text(",")) if members else ""} "}}"'

    def _value(self, rules: Rules, root: Any, schema: Any, depth: int) -> str:
        mark = rules.mark(self.quote)
        text = f"{mark} {rules.until(self.quote)}"
        if texts := texts_of(root, schema):
            return f"{mark} ({' | '.join(map(lark_text, texts))}) {mark}"
        kinds = types_of(root, schema)
        schema = resolve(root, schema)
        forms = [text] if "string" in kinds or not kinds or depth > 8 else []
        forms += [
            r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?/" if kind == "number" else r"/-?(0|[1-9][0-9]{0,18})/"
            for kind in ("number", "integer")
            if kind in kinds
        ]
        forms += ['"true" | "false"'] if "boolean" in kinds else []
        forms += ['"null"'] if "null" in kinds else []
        if depth <= 8 and "object" in kinds and isinstance(schema, dict):
            forms.append(self._object(rules, root, schema, depth))
        if depth <= 8 and "array" in kinds and isinstance(schema, dict):
            item = rules.rule(self._value(rules, root, schema.get("items"), depth + 1))
            forms.append(f'"[" ({item} ("," {item})*)? "]"')
        return f"({' | '.join(forms)})"
