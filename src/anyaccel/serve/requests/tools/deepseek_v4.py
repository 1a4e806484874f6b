# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's format: calls in DSML."""

from __future__ import annotations

from anyaccel.serve.requests.tools import dsml
from anyaccel.serve.requests.tools.format import ToolFormat, containing

FORMAT = ToolFormat(
    "deepseek-v4",
    models="DeepSeek V4",
    calls=(dsml.CALL,),
    known_by=containing("｜DSML｜", but=("function_calls",)),
    section=dsml.section("tool_calls"),
)
