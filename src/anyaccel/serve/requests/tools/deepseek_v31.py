# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.1's format: the function's name, then its arguments in JSON."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Arguments, Name

FORMAT = ToolFormat(
    "deepseek-v3.1",
    models="DeepSeek V3.1",
    calls=(("<｜tool▁call▁begin｜>", Name(), "<｜tool▁sep｜>", Arguments(), "<｜tool▁call▁end｜>"),),
    known_by=containing("<｜tool▁calls▁begin｜>"),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
