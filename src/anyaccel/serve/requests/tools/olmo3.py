# SPDX-License-Identifier: Apache-2.0
"""OLMo 3's format: calls in Python, each on a line of its own, between tags."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import PythonCalls

FORMAT = ToolFormat(
    "olmo3",
    models="OLMo 3",
    calls=(("<function_calls>\n", PythonCalls(end="</function_calls>"), "\n</function_calls>"),),
    known_by=containing("<function_calls>"),
)
