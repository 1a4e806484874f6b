# SPDX-License-Identifier: Apache-2.0
"""Hunyuan's format: a JSON list between <tool_calls> and </tool_calls>."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "hunyuan",
    models="Hunyuan A13B, Jamba",
    calls=(("<tool_calls>", Json(is_list=True), "</tool_calls>"),),
    known_by=containing("<tool_calls>"),
)
