# SPDX-License-Identifier: Apache-2.0
"""Llama 3.2's and 4's format: a list of calls in Python."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import Maybe, ToolFormat
from anyaccel.serve.requests.tools.parts import Json, PythonCalls

FORMAT = ToolFormat(
    "pythonic",
    models="Llama 3.2 (small ones) and 4",
    calls=(
        ("<|python_start|>", PythonCalls(), Maybe(("<|python_end|>",))),
        ("<|python_start|>", Json(arguments="parameters"), Maybe(("<|python_end|>",))),
        (PythonCalls(),),
    ),
    known_by=lambda template: "[func_name1(" in template or "<|python_start|>" in template,
    unmarked="[",
)
