# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's format: the function's name and an object with marks for quotes."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Name, Quoted

FORMAT = ToolFormat(
    "gemma-4",
    models="Gemma 4",
    calls=(("<|tool_call>", "call:", Name(), Quoted('<|"|>'), "<tool_call|>"),),
    known_by=containing("<|tool_call>", "<tool_call|>"),
)
