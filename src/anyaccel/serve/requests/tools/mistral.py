# SPDX-License-Identifier: Apache-2.0
"""Mistral's formats: [TOOL_CALLS] before a JSON list, or, since Mistral Small 3.2, before each call's name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from anyaccel.serve.requests.tools.format import ParsedCall, ToolFormat, json_calls, json_value

_BEGIN = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _parse(text: str) -> tuple[list[ParsedCall], int]:
    calls: list[ParsedCall] = []
    done = 0
    while text.startswith(_BEGIN, done):
        start = done + len(_BEGIN)
        if (named := _NAME.match(text, start)) is not None:
            found = json_value(text, named.end())
            if found is None or not isinstance(found[0], Mapping):
                break
            calls.append(ParsedCall(named[1], json.dumps(found[0], ensure_ascii=False)))
            end = found[1]
        else:
            several, end = json_calls(text, start)
            if not several:
                break
            calls += several
        done = end + len(text[end:]) - len(text[end:].lstrip())
    return calls, done


FORMAT = ToolFormat(
    "mistral",
    (_BEGIN,),
    lambda template: _BEGIN in template,
    _parse,
    special=True,
    short_ids=True,
    grammar=f"‹{_BEGIN}› GAP (@list | @named)",
    separator='""',
)
