# SPDX-License-Identifier: Apache-2.0
"""The text that a model is calibrated on, as windows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anyaccel
from anyaccel.errors import UsageError
from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.outside import read_text

BUILTIN = "builtin"
TOKENS = 16_384
WINDOW = 512  # tokens that are seen together
_LEAST = 4 * WINDOW  # tokens without which a text says too little about thousands of columns


def calibration_windows(model: Path, text: str, count: int, announce: Any = None) -> Tensor:
    """Tokens [windows, length] of a text file, or of the text that comes with the package ("builtin").

    Raises:
        UsageError: no such file, or it is too short.
    """
    if text == BUILTIN:
        content = builtin_text()
    else:
        path = Path(text).expanduser()
        if not path.is_file():
            raise UsageError(f"--calibrate {text}: no such text file; give one, or {BUILTIN!r}")
        content = read_text(path)
    if not content.strip():
        raise UsageError(
            f"--calibrate {text}: the file is empty; a few pages of the text that the model is for do well"
        )
    tokens = load_text_tokenizer(model, announce).encode(content)
    if len(tokens) < _LEAST:
        raise UsageError(f"--calibrate {text}: {len(tokens)} tokens; at least {_LEAST} are needed, {count} are good")
    windows = torch.tensor(tokens[: len(tokens) // WINDOW * WINDOW]).view(-1, WINDOW)
    if len(windows) * WINDOW <= count:
        return windows
    # From all over the text: its beginning may be of one kind.
    chosen = torch.linspace(0, len(windows) - 1, max(count // WINDOW, 1)).long()
    return windows[chosen]


def builtin_text() -> str:
    """English and code: this package's own sources, of which a good half is prose."""
    folder = Path(anyaccel.__file__).parent
    return "\n\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
