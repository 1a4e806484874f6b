# SPDX-License-Identifier: Apache-2.0
"""Nemotron's format: a JSON list between <TOOLCALL> and </TOOLCALL>."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "nemotron",
    models="Nemotron Nano and Super",
    calls=(("<TOOLCALL>", Json(is_list=True), "</TOOLCALL>"),),
    known_by=containing("<TOOLCALL>"),
)
