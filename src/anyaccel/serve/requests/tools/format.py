# SPDX-License-Identifier: Apache-2.0
"""What describes a format of tool calls, and the JSON that most formats have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_decoder = json.JSONDecoder()


@dataclass(frozen=True)
class ParsedCall:
    """One call; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write calls.

    Attributes:
        marks: texts that begin a call.
        matches: returns whether a chat template describes this format.
        parse: returns the calls at the beginning of a text, and the number of characters that they take.
        special: whether the marks are special tokens, which decoding normally leaves out.
        unmarked: an answer that begins with this is a call without a mark; "": there are none.
        end: the mark that ends a call.
        end_of_call: returns the end of the first call in a text, so that it is returned while the answer goes on; 0
            while the call is incomplete.
        short_ids: whether the model's template takes only ids of nine characters.
        grammar: how a call is written, as a rule of llguidance's Lark: marks between ‹ and ›, @call for JSON with name
            and arguments, @list for a list of these, @named for a name before its arguments, GAP for white space.
        separator: what separates calls, in Lark.
        arguments: the name of the arguments in @call and @list.
    """

    name: str
    marks: tuple[str, ...]
    matches: Callable[[str], bool]
    parse: Callable[[str], tuple[list[ParsedCall], int]]
    special: bool = False
    unmarked: str = ""
    end: str = ""
    end_of_call: Callable[[str], int] = lambda _: 0
    short_ids: bool = False
    grammar: str = ""
    separator: str = '"\\n"'
    arguments: str = "arguments"


def parse_call(value: Any) -> ParsedCall | None:
    """The call that a JSON value describes, or None."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return ParsedCall(name, arguments)
    if arguments is not None and not isinstance(arguments, Mapping):
        return None
    return ParsedCall(name, json.dumps(arguments or {}, ensure_ascii=False))


def json_value(text: str, place: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `place`, after white space, and its end; None if there is no complete one."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        return _decoder.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None


def json_calls(text: str, place: int) -> tuple[list[ParsedCall], int]:
    """The calls from `place` on, as JSON objects separated by ; or line breaks, or as a list; and their end."""
    calls: list[ParsedCall] = []
    while (found := json_value(text, place)) is not None:
        value, end = found
        several = [parse_call(each) for each in (value if isinstance(value, list) else [value])]
        if not several or None in several:
            break
        calls += [call for call in several if call is not None]
        place = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n;"))
    return calls, place
