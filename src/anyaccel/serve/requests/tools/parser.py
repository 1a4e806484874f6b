# SPDX-License-Identifier: Apache-2.0
"""Divides an answer into text and tool calls while it comes.

An incomplete or malformed call stays text. A call is returned when it is complete, as clients take its arguments in one
piece; where a grammar makes sure of it, its arguments are returned while they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.inference.text.stopping import overlap
from anyaccel.serve.requests.tools.format import FAIL, MORE, Found, ParsedCall, ToolFormat


class ToolCallParser:
    """Parses an answer in the model's own format.

    Args:
        schemas: the parameters of the functions that may be called, by name. What looks like a call without a mark, but
            names none of them, is text.
        is_required: whether a grammar makes the answer consist of calls.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Any], is_required: bool = False) -> None:
        self._form = form
        self._schemas = schemas
        self._is_required = is_required
        self._text = ""
        self._state = (
            "start"  # of the answer; or "text"; or `_text` begins with a "call"; or one has just ended: "after"
        )
        self._count = 0
        self._has_text = False  # white space before the first call is no content
        self._lines = ""  # line breaks before the call, which belong to the text if it is none
        self._shown = -1  # the end of the arguments that have been returned of the open call; -1: not even its name

    def add(self, text: str, last: bool = False) -> tuple[str, list[ParsedCall]]:
        """The next text and the next calls; `last`: no more text comes."""
        self._text += text
        content = ""
        calls: list[ParsedCall] = []
        while True:
            before = self._state, self._text
            if self._state in ("start", "after"):
                self._find_unmarked(last)
            if self._state == "text":
                content += self._take_text(last)
            if self._state == "call":
                content += self._take_call(calls, last)
            if (self._state, self._text) == before or not self._text:
                return content, calls

    def _find_unmarked(self, last: bool) -> None:
        """At the beginning of the answer and after a call: find a call without a mark, or go on with the text."""
        text, form = self._text.lstrip(), self._form
        if self._state == "after":
            self._text = text  # white space after a call is no content
            for mark in filter(None, (form.section[1].strip(), form.separator.strip())):
                if text.startswith(mark):
                    self._text = text[len(mark) :].lstrip()
                    return
                if mark.startswith(text):  # it comes yet, or max_tokens has cut it
                    self._text = "" if last else text
                    return
        if not text and not last:
            return
        self._lines = ""
        unmarked = bool(form.unmarked) and text.startswith(form.unmarked)
        self._state = "call" if unmarked else "text"

    def _take_text(self, last: bool) -> str:
        """Take the text before the next mark; what may become a mark, and the line breaks before it, stay."""
        places = [place for mark in self._form.marks if (place := self._text.find(mark)) >= 0]
        if places:
            self._state = "call"
            text, self._text = self._text[: min(places)], self._text[min(places) :]
            shown = text.rstrip("\n") if self._has_text or not text.isspace() else ""
            self._lines = text[len(shown) :]
        else:
            end = len(self._text)
            if not last or self._is_cut:
                end -= max((overlap(self._text, mark) for mark in self._form.marks), default=0)
                end = len(self._text[:end].rstrip("\n"))
            if not self._has_text and not last and not self._text[:end].strip():
                return ""
            shown, self._text = self._text[:end], self._text[end:]
        self._has_text = self._has_text or bool(shown)
        return shown

    def _take_call(self, calls: list[ParsedCall], last: bool) -> str:
        """Take the call that the text begins with; returns what of it is text, after all."""
        found = Found(self._schemas)
        marks = [mark for mark in self._form.marks if self._text.startswith(mark)]
        end = self._form.match(self._text, found, last)
        if end >= 0 and not marks and not all(call.name in self._schemas for call in found.calls):
            end = FAIL
        if self._is_required and found.begun >= 0 and found.name:
            self._show_arguments(found, calls, found.ended if found.ended >= 0 else len(self._text))
            if end != MORE or last:  # what max_tokens has cut stays as it is
                self._text = self._text[end:] if end >= 0 else ""
                self._state, self._shown = "after", -1
                self._count += 1
            return ""
        if end == MORE and (not last or self._is_cut):
            self._text = "" if last else self._text
            return ""
        if end < 0:
            if self._shown >= 0:  # no grammar has held it, after all: what was returned stays as it is
                self._count, self._shown = self._count + 1, -1
            self._state = "text"
            mark = max(marks, key=len, default="")
            self._text = self._text[len(mark) :]
            self._has_text = True
            return self._lines + mark
        for call in found.calls:
            calls.append(ParsedCall(call.name, call.arguments, self._identity(call.name, call.identity)))
            self._count += 1
        self._text, self._state = self._text[end:], "after"
        return ""

    def _show_arguments(self, found: Found, calls: list[ParsedCall], end: int) -> None:
        """Return the arguments of the open call up to `end`."""
        if self._shown < 0:
            self._shown = found.begun
            identity = self._identity(found.name, found.identity)
            calls.append(ParsedCall(found.name, self._text[self._shown : end], identity))
        elif end > self._shown:
            calls.append(ParsedCall("", self._text[self._shown : end]))
        self._shown = max(self._shown, end)

    @property
    def _is_cut(self) -> bool:
        """Whether what comes last is only what max_tokens has left of a further call, which is no text."""
        return self._is_required and self._count > 0

    def _identity(self, name: str, given: str) -> str:
        """The id of a call, where the model has given it one."""
        return self._form.identity.format(name=name, index=given or self._count) if self._form.identity else given
