# SPDX-License-Identifier: Apache-2.0
"""The formats of tool calls by name, and the one that a chat template describes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.serve.requests.tools import (
    cohere,
    command_r,
    deepseek_v3,
    deepseek_v4,
    deepseek_v31,
    deepseek_v32,
    gemma,
    gemma4,
    glm,
    granite,
    harmony,
    hermes,
    hunyuan,
    kimi_k2,
    lfm2,
    llama3,
    minimax_m2,
    mistral,
    nemotron,
    olmo3,
    phi4,
    pythonic,
    qwen3_coder,
    seed_oss,
)
from anyaccel.serve.requests.tools.format import ToolFormat

# A chat template may contain the marks of several; the first counts. So those with rarer marks come first.
FORMATS: dict[str, ToolFormat] = {
    each.FORMAT.name: each.FORMAT
    for each in (
        harmony,
        seed_oss,
        deepseek_v32,
        deepseek_v4,
        qwen3_coder,
        minimax_m2,
        glm,
        kimi_k2,
        deepseek_v3,
        deepseek_v31,
        cohere,
        command_r,
        gemma4,
        gemma,
        nemotron,
        phi4,
        granite,
        lfm2,
        olmo3,
        hunyuan,
        mistral,
        hermes,
        pythonic,
        llama3,
    )
}


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template describes; without one it is Hermes', which `instructions` describe."""
    return next((each for each in FORMATS.values() if each.known_by(template)), hermes.FORMAT)


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text about tools for the system message, for a model whose chat template has none."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You may call these functions, each described by a line of JSON:\n"
        f"{described}\n"
        "To call one, answer with\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\n'
        "and nothing else; its result comes with the next message."
    )
