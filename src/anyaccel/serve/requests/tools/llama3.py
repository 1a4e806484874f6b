# SPDX-License-Identifier: Apache-2.0
"""Llama 3's format: JSON objects, after <|python_tag|> or without a mark."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import ToolFormat
from anyaccel.serve.requests.tools.parts import Json


def _known_by(template: str) -> bool:
    return "<|python_tag|>" in template or ("<|start_header_id|>" in template and "tools" in template)


FORMAT = ToolFormat(
    "llama3",
    models="Llama 3.1 and 3.3",
    calls=(
        ("<|python_tag|>", Json(arguments="parameters")),
        (Json(arguments="parameters"),),
    ),
    known_by=_known_by,
    unmarked="{",
    separator="; ",
)
