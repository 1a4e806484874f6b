# SPDX-License-Identifier: Apache-2.0
"""Divides an answer into text and tool calls while it comes.

An incomplete or malformed call stays text. A call is returned when it is complete, as clients take its arguments in one
piece.
"""

from __future__ import annotations

from collections.abc import Collection

from anyaccel.inference.text.stopping import overlap
from anyaccel.serve.requests.tools.format import ParsedCall, ToolFormat, json_value, parse_call


class ToolCallParser:
    """Parses an answer in the model's own format.

    Args:
        names: the functions that may be called; JSON without a mark that names none of them is text.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form = form
        self._names = names
        self._text = ""
        self._started = False
        self._in_call = False  # whether `_text` begins with a call
        self._unmarked = False  # whether that call has no mark
        self._after_call = False  # whether a call has just ended, so that white space is skipped

    def add(self, text: str, last: bool = False) -> tuple[str, list[ParsedCall]]:
        """The next text and the next calls; `last`: no more text comes."""
        self._text += text
        form = self._form
        if not self._started:
            start = self._text.lstrip()
            if not start and not last:
                return "", []
            self._started = True
            self._in_call = self._unmarked = bool(form.unmarked) and start.startswith(form.unmarked)
        content = ""
        calls: list[ParsedCall] = []
        while True:
            if self._after_call:
                self._text = self._text.lstrip()
                self._after_call = not self._text
            if not self._in_call:
                content += self._text_before_call(last)
                if not self._in_call:
                    return content, calls
            # Parse the first complete call, or everything when no more text comes.
            size = len(self._text) if last else form.end_of_call(self._text)
            if not size:
                return content, calls
            found, done = form.parse(self._text[:size])
            if self._unmarked and not all(call.name in self._names for call in found):
                found = []
            self._unmarked = False
            if found:
                calls += found
                self._after_call = True
            else:  # a malformed call is text up to its end mark
                place = self._text.find(form.end, 0, size) if form.end else -1
                done = size if place < 0 else place + len(form.end)
                content += self._text[:done]
            self._text = self._text[done:]
            self._in_call = False
            if not self._text:
                return content, calls

    def _text_before_call(self, last: bool) -> str:
        """Take the text before the next mark; what may become a mark, and the line breaks before it, stay."""
        places = [place for mark in self._form.marks if (place := self._text.find(mark)) >= 0]
        if places:
            self._in_call = True
            text, self._text = self._text[: min(places)], self._text[min(places) :]
            return text.rstrip("\n")
        end = len(self._text)
        if not last:
            end -= max(overlap(self._text, mark) for mark in self._form.marks)
            end = len(self._text[:end].rstrip("\n"))
        text, self._text = self._text[:end], self._text[end:]
        return text


class ToolCallArrayParser:
    """Parses an answer that a grammar makes a JSON list of calls, and returns each call when it is complete."""

    def __init__(self) -> None:
        self._text = ""
        self._done = 0

    def add(self, text: str, last: bool = False) -> tuple[str, list[ParsedCall]]:
        """As `ToolCallParser.add`."""
        self._text += text
        calls: list[ParsedCall] = []
        while True:
            while self._done < len(self._text) and (self._text[self._done].isspace() or self._text[self._done] in "[,"):
                self._done += 1
            found = json_value(self._text, self._done)
            call = None if found is None else parse_call(found[0])
            if found is None or call is None:
                break
            self._done = found[1]
            calls.append(call)
        rest = self._text[self._done :].strip().removeprefix("]")
        # If max_tokens has cut the list, its incomplete last call is dropped; finish_reason tells the client.
        return ("", calls) if not last or calls or self._done else (rest, calls)
