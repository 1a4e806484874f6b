# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters for requests that leave them out: the model authors' recommendation, else OpenAI's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anyaccel.validation import Fields, read_json

# Our name -> the name in llama.cpp's metadata (https://github.com/ggml-org/llama.cpp/pull/17120).
_GGUF = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True)
class SamplingDefaults:
    """The defaults of the fields of a request that have the same names."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def describe(self) -> str:
        """The values that differ from OpenAI's defaults, as text for the user."""
        openai = asdict(SamplingDefaults())
        return ", ".join(f"{name} {value:g}" for name, value in asdict(self).items() if value != openai[name])


def read_defaults(model: Path) -> SamplingDefaults:
    """Read a model's defaults from generation_config.json in its folder, or from its GGUF file.

    Raises:
        ModelError: a value is invalid.
    """
    if model.is_dir():
        file = model / "generation_config.json"
        return parse_defaults(read_json(file), f"{file}: ") if file.is_file() else SamplingDefaults()
    from anyaccel.inference.checkpoints.gguf_file import GgufSource

    found = GgufSource(model).metadata
    given = {name: found.get(f"general.sampling.{key}") for name, key in _GGUF.items()}
    return parse_defaults(given, f"{model}: general.sampling: ")


def parse_defaults(given: Mapping[str, Any], where: str) -> SamplingDefaults:
    """Check values that were read, and make defaults of them; errors begin with `where`.

    Raises:
        ModelError: a value is invalid.
    """
    values = Fields(given, where)

    def number(name: str, default: float, most: float, above: float = -1.0) -> float:
        # Rounds away the error of a GGUF file's 32-bit floats: 0.95 must stay 0.95.
        return float(f"{values.number(name, default, 0, most, above):.7g}")

    return SamplingDefaults(
        temperature=number("temperature", 1.0, 100),
        top_p=number("top_p", 1.0, 1),
        top_k=max(0, values.get_int("top_k", 0, -1)),
        min_p=number("min_p", 0.0, 1),
        repetition_penalty=number("repetition_penalty", 1.0, 1e6, 0.0),
    )
