# SPDX-License-Identifier: Apache-2.0
"""FunctionGemma's format: the function's name and an object with marks for quotes."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Name, Quoted

FORMAT = ToolFormat(
    "gemma",
    models="FunctionGemma",
    calls=(("<start_function_call>", "call:", Name(), Quoted("<escape>"), "<end_function_call>"),),
    known_by=containing("<start_function_call>"),
)
