# SPDX-License-Identifier: Apache-2.0
"""Harmony, the format of gpt-oss: an answer is several messages, whose headers name a channel and a recipient.

<|channel|>analysis<|message|>...<|end|>
<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

import re

from anyaccel.inference.text.stopping import overlap
from anyaccel.serve.requests.tools.format import ParsedCall, ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Arguments, Name, load_object

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BEGINS = ("<|start|>", "<|channel|>", "to=")  # of a header; the prompt has begun the first one
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.\-]+)")

FORMAT = ToolFormat(
    "harmony",
    models="gpt-oss",
    calls=(("<|channel|>commentary to=functions.", Name(), " <|constrain|>json<|message|>", Arguments()),),
    known_by=containing("<|channel|>", "<|message|>"),
    ends=("<|call|>",),
    is_messages=True,
)


class HarmonyParser:
    """Divides an answer into thoughts, text and calls while it comes.

    Args:
        has_calls: whether functions may be called; otherwise what is for one is text.
        has_thoughts: whether thoughts are apart from the text.
        is_required: whether a grammar makes arguments valid, so that they are returned while they come.
        continues: whether the answer continues the text of the last message.
    """

    def __init__(self, has_calls: bool, has_thoughts: bool, is_required: bool = False, continues: bool = False) -> None:
        self._has_calls = has_calls
        self._has_thoughts = has_thoughts
        self._is_required = is_required
        self._text = ""
        self._kind = "content" if continues else ""  # of the open message; "": its header comes
        self._started = continues
        self._function = ""
        self._shown = 0
        self._written: set[str] = set()  # the kinds that have had a message before

    def add(self, text: str, last: bool = False) -> tuple[str, str, list[ParsedCall]]:
        """The next thoughts, text and calls; `last`: no more text comes."""
        self._text += text
        parts = {"reasoning": "", "content": ""}
        calls: list[ParsedCall] = []
        while True:
            if not self._kind and not self._take_header(last):
                return parts["reasoning"], parts["content"], calls
            body, ended = self._take_body(last, whole=self._kind == "call" and not self._is_required)
            if self._kind == "call":
                self._add_call(calls, body, ended)
            elif body:
                key = self._kind
                if key in self._written and not self._shown:
                    body = f"\n\n{body}"
                self._shown += len(body)
                self._written.add(key)
                parts[key] += body
            if not ended:
                return parts["reasoning"], parts["content"], calls
            self._kind = ""
            self._shown = 0

    def _take_header(self, last: bool) -> bool:
        """Take a message's header; whether it is there."""
        start = self._text.lstrip()
        if not self._started:
            # A model that writes no header has written the text.
            if not start or (not last and any(each.startswith(start) for each in _BEGINS)):
                return False
            self._started = True
            if not start.startswith(_BEGINS):
                self._kind = "content"
                return True
        head, mark, rest = self._text.partition(_MESSAGE)
        if not mark:
            return False
        self._text = rest
        channel, function = _CHANNEL.search(head), _FUNCTION.search(head)
        self._function = function[1] if function else ""
        if self._function and self._has_calls:
            self._kind = "call"
        elif channel is not None and channel[1] == "analysis" and self._has_thoughts:
            self._kind = "reasoning"
        else:
            self._kind = "content"
        return True

    def _take_body(self, last: bool, whole: bool) -> tuple[str, bool]:
        """The next text of the open message, or with `whole` all of it; and whether it ends."""
        places = [(place, mark) for mark in _ENDS if (place := self._text.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            body = self._text[:place]
            self._text = self._text[place + (0 if mark in _BEGINS else len(mark)) :]
            return body, True
        if whole and not last:
            return "", False
        end = len(self._text) - (0 if last else max(overlap(self._text, mark) for mark in _ENDS))
        body, self._text = self._text[:end], self._text[end:]
        return body, last

    def _add_call(self, calls: list[ParsedCall], body: str, ended: bool) -> None:
        if self._is_required:
            if body or not self._shown:
                calls.append(ParsedCall("" if self._shown else self._function, body))
                self._shown += max(1, len(body))
        elif ended:
            calls.append(ParsedCall(self._function, load_object(body) or body.strip() or "{}"))
