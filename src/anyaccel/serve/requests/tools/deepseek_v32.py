# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.2's format: calls in DSML."""

from __future__ import annotations

from anyaccel.serve.requests.tools import dsml
from anyaccel.serve.requests.tools.format import ToolFormat, containing

FORMAT = ToolFormat(
    "deepseek-v3.2",
    models="DeepSeek V3.2",
    calls=(dsml.CALL,),
    known_by=containing("｜DSML｜", "function_calls"),
    section=dsml.section("function_calls"),
)
