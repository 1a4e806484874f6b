# SPDX-License-Identifier: Apache-2.0
"""The formats of tool calls by name, and the one that a chat template describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.serve.requests.tools import hermes, llama3, mistral
from anyaccel.serve.requests.tools.format import ToolFormat

FORMATS: dict[str, ToolFormat] = {each.FORMAT.name: each.FORMAT for each in (hermes, mistral, llama3)}


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template describes; without one it is Hermes', which `instructions` describe."""
    return next((each for each in FORMATS.values() if each.matches(template)), hermes.FORMAT)


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
