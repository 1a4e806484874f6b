# SPDX-License-Identifier: Apache-2.0
"""GLM's format: the function's name, then keys and values between tags."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Name, Parameters

FORMAT = ToolFormat(
    "glm-4.5",
    models="GLM 4.5 to 4.7",
    calls=(
        (
            "<tool_call>",
            Name(),
            "\n",
            Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        ),
    ),
    known_by=containing("<arg_key>"),
)
