# SPDX-License-Identifier: Apache-2.0
"""Hermes' and Qwen's format: JSON between <tool_call> and </tool_call>."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "hermes",
    models="Qwen 2.5 and 3, Hermes, Granite 4, ERNIE 4.5, and models whose template has no tools",
    calls=(("<tool_call>\n", Json(), "\n</tool_call>"),),
    known_by=containing("<tool_call>"),
)
