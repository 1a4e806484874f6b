# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2's format: functions and their parameters in XML."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Name, Parameters

FORMAT = ToolFormat(
    "minimax-m2",
    models="MiniMax M2",
    calls=(('<invoke name="', Name(), '">\n', Parameters('<parameter name="', '">', "</parameter>\n", "</invoke>")),),
    known_by=containing("<minimax:tool_call>"),
    section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
)
