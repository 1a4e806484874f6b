# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3's and R1's format: the function's name, then its arguments in a block of JSON."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Arguments, Name

FORMAT = ToolFormat(
    "deepseek-v3",
    models="DeepSeek V3 and R1",
    calls=(
        (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            Name(),
            "\n```json\n",
            Arguments(),
            "\n```<｜tool▁call▁end｜>",
        ),
    ),
    known_by=containing("<｜tool▁calls▁begin｜>", "```json"),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
