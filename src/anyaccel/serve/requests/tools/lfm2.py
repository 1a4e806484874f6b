# SPDX-License-Identifier: Apache-2.0
"""LFM2's format: a list of calls in Python between marks."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat
from anyaccel.serve.requests.tools.parts import Json, PythonCalls

FORMAT = ToolFormat(
    "lfm2",
    models="LFM2 and 2.5",
    calls=(
        ("<|tool_call_start|>", PythonCalls(), "<|tool_call_end|>"),
        ("<|tool_call_start|>", Json(is_list=True), "<|tool_call_end|>"),
    ),
    known_by=lambda template: "<|tool_list_start|>" in template or "<|tool_call_start|>" in template,
)
