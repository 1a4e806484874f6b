# SPDX-License-Identifier: Apache-2.0
"""Cohere's former format: a JSON list with names of its own in a block."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "command-r",
    models="Command R and R+",
    calls=(("Action:\n```json\n", Json(is_list=True, name="tool_name", arguments="parameters"), "\n```"),),
    known_by=containing("Action:", "tool_name", "```json"),
)
