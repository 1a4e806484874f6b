# SPDX-License-Identifier: Apache-2.0
"""Calls of functions in an answer's text, in the formats that models write: Hermes and Qwen, Llama 3, Mistral.

`format_of` finds the format in the model's chat template. An incomplete or malformed call stays text. A call is
returned when it is complete, as clients take its arguments in one piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.inference.text.stopping import overlap

_decoder = json.JSONDecoder()
_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")

_STRING_OR_END = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|</tool_call>', re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call; `arguments` is JSON."""

    name: str
    arguments: str


def call_of(value: Any) -> Call | None:
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
        return Call(name, arguments)
    if arguments is not None and not isinstance(arguments, Mapping):
        return None
    return Call(name, json.dumps(arguments or {}, ensure_ascii=False))


def _value_at(text: str, place: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `place`, after spaces, and its end; None if there is no complete one."""
    while place < len(text) and text[place].isspace():
        place += 1
    try:
        return _decoder.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None


def _hermes(text: str) -> tuple[list[Call], int]:
    """Calls between <tool_call> and </tool_call>, and the length of the text that they take."""
    calls: list[Call] = []
    done = 0
    while text.startswith("<tool_call>", done):
        found = _value_at(text, done + len("<tool_call>"))
        call = None if found is None else call_of(found[0])
        if call is None or found is None:
            break
        rest = text[found[1] :].lstrip()
        if rest and not rest.startswith("</tool_call>"):
            break
        calls.append(call)
        done = len(text) - len(rest.removeprefix("</tool_call>").lstrip())
    return calls, done


def _hermes_end(text: str) -> int:
    """The end of the first call of a text, or 0 if it is incomplete. A mark inside a JSON string does not end it."""
    ends = (found.end() for found in _STRING_OR_END.finditer(text) if found[0] == "</tool_call>")
    return next(ends, 0)


def _objects(text: str, done: int) -> tuple[list[Call], int]:
    """Calls as JSON objects separated by ; or line breaks, or as a list."""
    calls: list[Call] = []
    while (found := _value_at(text, done)) is not None:
        value, end = found
        several = [call_of(each) for each in (value if isinstance(value, list) else [value])]
        if not several or None in several:
            break
        calls += [call for call in several if call is not None]
        done = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n;"))
    return calls, done


def _llama3(text: str) -> tuple[list[Call], int]:
    calls, done = _objects(text, len("<|python_tag|>") if text.startswith("<|python_tag|>") else 0)
    return calls, done if calls else 0


def _mistral(text: str) -> tuple[list[Call], int]:
    calls: list[Call] = []
    done = 0
    while text.startswith("[TOOL_CALLS]", done):
        start = done + len("[TOOL_CALLS]")
        if (named := _NAME.match(text, start)) is not None:  # the format since Mistral Small 3.2
            found = _value_at(text, named.end())
            if found is None or not isinstance(found[0], Mapping):
                break
            calls.append(Call(named[1], json.dumps(found[0], ensure_ascii=False)))
            end = found[1]
        else:
            several, end = _objects(text, start)
            if not several:
                break
            calls += several
        done = end + len(text[end:]) - len(text[end:].lstrip())
    return calls, done


@dataclass(frozen=True)
class Format:
    """The format in which a model writes calls.

    Attributes:
        marks: texts that begin a call.
        parse: returns the calls at the beginning of a text, and the number of characters that they take.
        special: whether the marks are special tokens, which decoding normally leaves out.
        alone: an answer that begins with this is a call without a mark.
        end: the mark that ends a call.
        end_of: returns the end of the first call, so that it is returned while the answer goes on; 0: it is incomplete.
        call: how a call is written, as a rule of llguidance's Lark: marks between ‹ and ›, @call for JSON with name and
            arguments, @list for a list of these, @named for a name before its arguments, GAP for white space.
        between: what separates calls.
        key: the name of the arguments in @call and @list.
    """

    name: str
    marks: tuple[str, ...]
    parse: Callable[[str], tuple[list[Call], int]]
    special: bool = False
    alone: str = ""
    end: str = ""
    end_of: Callable[[str], int] = lambda _: 0
    call: str = ""
    between: str = '"\\n"'
    key: str = "arguments"


FORMATS = {
    each.name: each
    for each in (
        Format(
            "hermes", ("<tool_call>",), _hermes, end="</tool_call>", end_of=_hermes_end,
            call="‹<tool_call>› GAP @call GAP ‹</tool_call>›",
        ),
        Format(
            "llama3", ("<|python_tag|>",), _llama3, special=True, alone="{",
            call="‹<|python_tag|>›? @call", between='"; "', key="parameters",
        ),
        Format(
            "mistral", ("[TOOL_CALLS]",), _mistral, special=True,
            call="‹[TOOL_CALLS]› GAP (@list | @named)", between='""',
        ),
    )
}  # fmt: skip


def format_of(template: str) -> Format:
    """The format that a chat template describes; for one without tools Hermes', which our own instructions describe."""
    for name, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>")):
        if mark in template:
            return FORMATS[name]
    return FORMATS["llama3"] if "<|start_header_id|>" in template and "tools" in template else FORMATS["hermes"]


class CallsInText:
    """Divides an answer into text and calls while it comes.

    Args:
        names: the functions that may be called; JSON without a mark that names none of them is text.
    """

    def __init__(self, form: Format, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._unmarked = False
        self._text = ""
        self._inside = False  # whether `_text` begins with a mark
        self._after = False  # whether a call has just ended, so that white space is skipped
        self._begun = False

    def add(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        """The next text and the next calls; `last`: no more text comes."""
        self._text += text
        form = self._form
        if not self._begun:
            start = self._text.lstrip()
            if not start and not last:
                return "", []
            self._begun = True
            self._inside = self._unmarked = bool(form.alone) and start.startswith(form.alone)
        shown = ""
        calls: list[Call] = []
        while True:
            if self._after:
                self._text = self._text.lstrip()
                self._after = not self._text
            if not self._inside:
                places = [place for mark in form.marks if (place := self._text.find(mark)) >= 0]
                if not places:
                    cut = len(self._text)
                    if not last:  # hold back what may become a mark, and the line breaks before it
                        cut -= max(overlap(self._text, mark) for mark in form.marks)
                        cut = len(self._text[:cut].rstrip("\n"))
                    shown, self._text = shown + self._text[:cut], self._text[cut:]
                    return shown, calls
                before, self._text = self._text[: min(places)], self._text[min(places) :]
                shown += before.rstrip("\n")
                self._inside = True
            # Parse the first complete call, or everything when no more text comes.
            size = len(self._text) if last else form.end_of(self._text)
            if not size:
                return shown, calls
            found, done = form.parse(self._text[:size])
            if self._unmarked and not all(call.name in self._names for call in found):
                found = []
            self._unmarked = False
            if found:
                calls += found
                self._after = True
            else:  # a malformed call: it is text up to its end mark
                place = self._text.find(form.end, 0, size) if form.end else -1
                done = size if place < 0 else place + len(form.end)
                shown += self._text[:done]
            self._text = self._text[done:]
            self._inside = False
            if not self._text:
                return shown, calls


class CallsInArray:
    """Reads an answer that a grammar makes a JSON list of calls, and returns each call when it is complete."""

    def __init__(self) -> None:
        self._text = ""
        self._done = 0

    def add(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        self._text += text
        calls: list[Call] = []
        while True:
            while self._done < len(self._text) and (self._text[self._done].isspace() or self._text[self._done] in "[,"):
                self._done += 1
            found = _value_at(self._text, self._done)
            call = None if found is None else call_of(found[0])
            if found is None or call is None:
                break
            self._done = found[1]
            calls.append(call)
        rest = self._text[self._done :].strip().removeprefix("]")
        # If max_tokens has cut the list, its incomplete last call is dropped; finish_reason tells the client.
        return ("", calls) if not last or calls or self._done else (rest, calls)


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text about tools for the system message, for a model whose chat template has none."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call these functions, each described by a line of JSON:\n"
        f"{described}\n"
        "To call one, answer with\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\n'
        "and nothing else; its result comes with the next message."
    )
