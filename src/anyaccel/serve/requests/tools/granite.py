# SPDX-License-Identifier: Apache-2.0
"""Granite 3's format: a JSON list after a mark."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "granite",
    models="Granite 3",
    calls=(
        ("<|tool_call|>", Json(is_list=True)),
        ("<tool_call>", Json(is_list=True)),
    ),
    known_by=containing("<|start_of_role|>", but=("</tool_call>",)),
)
