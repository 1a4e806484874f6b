# SPDX-License-Identifier: Apache-2.0
"""Phi 4's format: JSON after a mark, in either of two forms."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "phi-4",
    models="Phi 4 mini",
    calls=(
        ("<|tool_call|>", Json(is_list=True), "<|/tool_call|>"),
        ("functools", Json(is_list=True)),
    ),
    known_by=containing("<|/tool_call|>"),
)
