# SPDX-License-Identifier: Apache-2.0
"""Cohere's format: a JSON list with names of its own between marks."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Json

FORMAT = ToolFormat(
    "cohere",
    models="Command R7B and A",
    calls=(
        (
            "<|START_ACTION|>",
            Json(is_list=True, name="tool_name", arguments="parameters", number="tool_call_id"),
            "<|END_ACTION|>",
        ),
    ),
    known_by=containing("<|START_ACTION|>"),
)
