# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 Coder's format: a function and its parameters between tags."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import Maybe, ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Name, Parameters

FORMAT = ToolFormat(
    "qwen3-coder",
    models="Qwen 3 Coder and 3.5, Nemotron 3",
    # Small models leave out the outer tags.
    calls=(
        (
            Maybe(("<tool_call>\n",)),
            "<function=",
            Name(),
            ">\n",
            Parameters("<parameter=", ">\n", "\n</parameter>\n", "</function>"),
            Maybe(("\n</tool_call>",)),
        ),
    ),
    known_by=containing("<function=", "<parameter="),
)
