# SPDX-License-Identifier: Apache-2.0
"""Llama 3's format: JSON objects, after <|python_tag|> or without a mark."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ParsedCall, ToolFormat, json_calls

_BEGIN = "<|python_tag|>"


def _matches(template: str) -> bool:
    return _BEGIN in template or ("<|start_header_id|>" in template and "tools" in template)


def _parse(text: str) -> tuple[list[ParsedCall], int]:
    calls, done = json_calls(text, len(_BEGIN) if text.startswith(_BEGIN) else 0)
    return calls, done if calls else 0


FORMAT = ToolFormat(
    "llama3",
    (_BEGIN,),
    _matches,
    _parse,
    special=True,
    unmarked="{",
    grammar=f"‹{_BEGIN}›? @call",
    separator='"; "',
    arguments="parameters",
)
