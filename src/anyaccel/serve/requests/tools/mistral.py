# SPDX-License-Identifier: Apache-2.0
"""Mistral's formats: [TOOL_CALLS] before a JSON list, or, since Mistral Small 3.2, before each call's name."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import Maybe, ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Arguments, Json, Name, Word

FORMAT = ToolFormat(
    "mistral",
    models="Mistral, Mixtral, Magistral, Devstral",
    calls=(
        ("[TOOL_CALLS]\n", Json(is_list=True)),
        (
            "[TOOL_CALLS]",
            Name(),
            Maybe(("[CALL_ID]", Word("[a-zA-Z0-9]{9}", is_identity=True))),
            Maybe(("[ARGS]",)),
            Arguments(),
        ),
    ),
    known_by=containing("[TOOL_CALLS]"),
    short_ids=True,
)
