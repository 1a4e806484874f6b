# SPDX-License-Identifier: Apache-2.0
"""What describes a format of tool calls: a sequence of parts, by which answers are parsed and grammars are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyaccel.serve.interface import Grammar

# What matching returns instead of a place: the text is the beginning of what may fit; it does not fit.
MORE, FAIL = -1, -2

_GAP = re.compile(r"\s*\n\s*")
_MARK = re.compile(r"(<[^<>]+>|\[[A-Z_/]+\])")
_INNER_MARK = re.compile(r"(｜\w+｜)")  # DeepSeek's ｜DSML｜ is a token within marks


@dataclass(frozen=True)
class ParsedCall:
    """One call; `arguments` is JSON. Without a name it is more of the arguments of the call before."""

    name: str
    arguments: str
    identity: str = ""


@dataclass
class Found:
    """What the parts of a format have found so far in one text.

    Attributes:
        schemas: the parameters of each function.
        begun, ended: where the arguments are, if they are JSON; -1: not yet.
    """

    schemas: Mapping[str, Any]
    name: str = ""
    identity: str = ""
    arguments: str | None = None
    begun: int = -1
    ended: int = -1
    calls: list[ParsedCall] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A function that may be called; `arguments` is the grammar of its arguments, a JSON schema."""

    name: str
    arguments: Grammar

    @property
    def schema(self) -> Any:
        return json.loads(self.arguments.text)


class Part(Protocol):
    """A part of a call. Texts are parts too: a line break in them stands for any white space."""

    @property
    def whole(self) -> bool:
        """Whether it has all calls of an answer, with their names."""

    def match(self, text: str, place: int, found: Found) -> int:
        """The end of this part, which begins at `place`, or MORE, or FAIL.

        More text changes only MORE.
        """

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        """The part in llguidance's Lark; there is one function, unless the part is whole."""


Parts = tuple["str | Part", ...]


def skip(text: str, place: int) -> int:
    """The place after white space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def match_text(text: str, place: int, wanted: str) -> int:
    """Match a text of a format, with any white space before it and wherever it has a line break."""
    for piece in filter(None, _GAP.split(wanted)):
        if text.startswith(piece, place):  # before white space is skipped, as a piece may begin with a blank
            place += len(piece)
            continue
        piece, place = piece.lstrip(), skip(text, place)
        if not text.startswith(piece, place):
            return MORE if piece.startswith(text[place:]) else FAIL
        place += len(piece)
    return place


def match_parts(parts: Sequence[str | Part], text: str, place: int, found: Found, last: bool = False) -> int:
    """Match parts, one after another; with the `last` text, marks at the end may be missing."""
    for number, part in enumerate(parts):
        end = match_text(text, place, part) if isinstance(part, str) else part.match(text, place, found)
        complete = found.calls or found.arguments is not None
        if end == MORE and last and complete and all(isinstance(each, str | Maybe) for each in parts[number:]):
            return len(text)
        if end < 0:
            return end
        place = end
    return place


@dataclass(frozen=True)
class Maybe:
    """Parts that may be missing."""

    parts: Parts
    whole = False

    def match(self, text: str, place: int, found: Found) -> int:
        end = match_parts(self.parts, text, place, found)
        return place if end == FAIL else end

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        return f"({rules.sequence(self.parts, functions, several)})?"


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write calls.

    Attributes:
        calls: the forms of a call, or of all calls; the first that fits counts.
        known_by: returns whether a chat template describes this format.
        models: whose format it is, for the documentation.
        section: the marks around all calls, if there are any.
        unmarked: an answer that begins with this may be a call without a mark; "": none.
        separator: what separates calls.
        short_ids: whether the model's template takes only ids of nine characters.
        identity: the ids of calls where the model counts them itself, with {name} and {index}.
        ends: tokens that end an answer after a call.
        is_messages: whether an answer consists of messages with headers, see `harmony.py`.
    """

    name: str
    models: str
    calls: tuple[Parts, ...]
    known_by: Callable[[str], bool]
    section: tuple[str, str] = ("", "")
    unmarked: str = ""
    separator: str = ""
    short_ids: bool = False
    identity: str = ""
    ends: tuple[str, ...] = ()
    is_messages: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that begin a call."""
        found = [self.section[0].strip()] if self.section[0] else []
        for parts in self.calls:
            for part in parts:
                first = part.parts[0] if isinstance(part, Maybe) else part
                if isinstance(first, str):
                    found.append(_GAP.split(first)[0])
                if not isinstance(part, Maybe):
                    break
        return tuple(dict.fromkeys(found))

    def match(self, text: str, found: Found, last: bool) -> int:
        """The end of the call that a text begins with, or MORE, or FAIL; fills `found`.

        Args:
            last: no more text comes: where one form is incomplete, another one may be complete.
        """
        begin = Maybe((self.section[0],))
        result = FAIL
        for parts in self.calls:
            attempt = Found(found.schemas)
            end = match_parts((begin, *parts) if self.section[0] else parts, text, 0, attempt, last)
            if end == FAIL:
                continue
            if end != MORE and not attempt.calls:
                attempt.calls.append(ParsedCall(attempt.name, attempt.arguments or "{}", attempt.identity))
            vars(found).update(vars(attempt))
            if end != MORE or not last:
                return end
            result = MORE
        return result

    def lark(self, rules: Rules, functions: Sequence[Function], several: bool) -> str:
        """The name of a rule for all calls of an answer."""
        forms = []
        for parts in self.calls:
            if any(not isinstance(part, str) and part.whole for part in parts):
                forms.append(rules.sequence(parts, functions, several))
            else:
                forms += [rules.sequence(parts, [function], several) for function in functions]
        call = rules.rule(" | ".join(forms))
        separator = rules.text(self.separator) if self.separator else "GAP"
        more = f" ({separator} {call})*" if several else ""
        begin, end = (rules.text(mark) if mark else "" for mark in self.section)
        return rules.rule(f"{begin} {call}{more} {end}")


class Rules:
    """Writes a grammar in llguidance's Lark.

    Args:
        token_id: the token that the vocabulary has for a mark, if any: llguidance matches such a token by its number.
    """

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self.token_id = token_id
        self.lines = [r"ANY: /(?s:.*)/", r"GAP: /\s{0,4}/", r"LINES: /\n{0,3}/"]
        self.parts: list[tuple[str, Grammar]] = []

    def mark(self, text: str) -> str:
        """Exactly this text, with its tokens."""
        tokens = self._pieces(text)
        return " ".join(lark_text(piece) if token is None else f"<[{token}]>" for piece, token in tokens)

    def text(self, text: str) -> str:
        """A text of a format, in which a line break stands for any white space."""
        return " GAP ".join(self.mark(piece) for piece in _GAP.split(text)).strip()

    def until(self, end: str) -> str:
        """Any text, and the mark that ends it."""
        pieces = self._pieces(end)
        for place, (_, token) in enumerate(pieces):
            if token is not None:  # no text contains such a token
                before, after = ("".join(piece for piece, _ in part) for part in (pieces[:place], pieces[place:]))
                before = re.sub(r"[.^$*+?{}\[\]\\|()/]", r"\\\g<0>", before.strip())
                return f"{f'/(?s:.*){before}/' if before else 'ANY'} {self.mark(after)}"
        return self.rule("ANY", f"[suffix={lark_text(end)}]")

    def ends_with_token(self, end: str) -> bool:
        """Whether the first piece of a mark is a token, so that a text cannot contain it."""
        return self._pieces(end)[0][1] is not None

    def _pieces(self, text: str) -> list[tuple[str, int | None]]:
        """The marks of a text and what is between them, with their tokens; marks that are none may contain some."""
        found: list[tuple[str, int | None]] = []
        for piece in filter(None, _MARK.split(text)):
            token = self.token_id(piece)
            inner = [(each, self.token_id(each)) for each in _INNER_MARK.findall(piece)] if token is None else []
            tokens = {each: number for each, number in inner if number is not None}
            if tokens:
                found += [(each, tokens.get(each)) for each in _INNER_MARK.split(piece) if each]
            else:
                found.append((piece, token))
        return found

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def part(self, grammar: Grammar) -> str:
        """Add a grammar of its own; returns how to refer to it."""
        name = f"p{len(self.parts)}"
        self.parts.append((name, grammar))
        return f"@{name}"

    def sequence(self, parts: Sequence[str | Part], functions: Sequence[Function], several: bool) -> str:
        """Parts, one after another."""
        made = [self.text(part) if isinstance(part, str) else part.lark(self, functions, several) for part in parts]
        return re.sub(r"GAP( GAP)+", "GAP", " ".join(filter(None, made)))

    def members(self, members: Sequence[tuple[str, bool]], separator: str = "") -> str:
        """Members in their order, each with whether it is required.

        Returns:
            an expression.
        """
        if not separator:
            return " ".join(member if required else f"({member})?" for member, required in members)
        # For each member two rules for the rest of the list: nothing has come before it, or something has.
        first, later = '""', '""'
        for member, required in reversed(members):
            with_it = f"{member} {self.rule(later)}"
            after = f"{separator} {with_it}"
            first, later = (
                (with_it, after) if required else (f"{with_it} | {self.rule(first)}", f"{after} | {self.rule(later)}")
            )
        return self.rule(first)


def lark_text(text: str) -> str:
    """A text as a string of Lark. JSON strings are Lark strings, except for a bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def containing(*marks: str, but: Sequence[str] = ()) -> Callable[[str], bool]:
    """A test of chat templates: all of these texts are in it, and none of `but`."""
    return lambda template: all(mark in template for mark in marks) and not any(mark in template for mark in but)


def to_json(value: Any) -> str:
    """A value as JSON.

    Raises:
        ValueError: it has a number that is not finite, which JSON cannot have.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def walk_calls(value: Any) -> Iterator[ParsedCall | None]:
    """The calls that a JSON value describes: an object, or a list of them."""
    for each in value if isinstance(value, list) else [value]:
        yield parse_call(each)


def parse_call(value: Any) -> ParsedCall | None:
    """The call that a JSON value describes, or None."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("function"), Mapping):
        value = value["function"]
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return ParsedCall(name, arguments)
    if arguments is not None and not isinstance(arguments, Mapping):
        return None
    try:
        return ParsedCall(name, to_json(arguments or {}))
    except ValueError:
        return None
