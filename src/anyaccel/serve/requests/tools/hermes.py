# SPDX-License-Identifier: Apache-2.0
"""Hermes' and Qwen's format: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

import re

from anyaccel.serve.requests.tools.format import ParsedCall, ToolFormat, json_value, parse_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_STRING_OR_END = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|</tool_call>', re.DOTALL)


def _parse(text: str) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    done = 0
    while text.startswith(_BEGIN, done):
        found = json_value(text, done + len(_BEGIN))
        call = None if found is None else parse_call(found[0])
        if call is None or found is None:
            break
        rest = text[found[1] :].lstrip()
        if rest and not rest.startswith(_END):
            break
        calls.append(call)
        done = len(text) - len(rest.removeprefix(_END).lstrip())
    return calls, done


def _end_of_call(text: str) -> int:
    """The end of the first call. A mark inside a JSON string does not end it."""
    ends = (found.end() for found in _STRING_OR_END.finditer(text) if found[0] == _END)
    return next(ends, 0)


FORMAT = ToolFormat(
    "hermes",
    (_BEGIN,),
    lambda template: _BEGIN in template,
    _parse,
    end=_END,
    end_of_call=_end_of_call,
    grammar=f"‹{_BEGIN}› GAP @call GAP ‹{_END}›",
)
