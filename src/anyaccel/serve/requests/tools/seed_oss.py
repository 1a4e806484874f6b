# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS's format: a function and its parameters between tags of its own."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Name, Parameters

FORMAT = ToolFormat(
    "seed-oss",
    models="Seed-OSS",
    calls=(
        (
            "<seed:tool_call>\n<function=",
            Name(),
            ">\n",
            Parameters("<parameter=", ">", "</parameter>\n", "</function>"),
            "\n</seed:tool_call>",
        ),
    ),
    known_by=containing("<seed:tool_call>"),
)
