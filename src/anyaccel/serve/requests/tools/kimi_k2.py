# SPDX-License-Identifier: Apache-2.0
"""Kimi K2's format: the function's name and the call's number, then its arguments in JSON."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import Maybe, ToolFormat, containing
from anyaccel.serve.requests.tools.parts import Arguments, Name, Word

FORMAT = ToolFormat(
    "kimi-k2",
    models="Kimi K2",
    calls=(
        (
            "<|tool_call_begin|>",
            Maybe(("functions.",)),
            Name(),
            ":",
            Word(is_identity=True),
            "<|tool_call_argument_begin|>",
            Arguments(),
            "<|tool_call_end|>",
        ),
    ),
    known_by=containing("<|tool_call_begin|>"),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    identity="functions.{name}:{index}",  # the template names the call by its id
)
