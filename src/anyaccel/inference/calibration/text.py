# SPDX-License-Identifier: Apache-2.0
"""The text that a model is calibrated on, as windows of tokens."""

from __future__ import annotations

import codecs
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anyaccel
from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.validation import open_file

BUILTIN = "builtin"
TOKENS = 16_384
WINDOW = 512  # tokens that are seen together
_LEAST = 4 * WINDOW  # tokens without which a text says too little about thousands of columns
_MOST_BYTES = 4 << 20  # of a file that are read whole; of a larger one so many, in pieces from all over it
_PIECES = 64


def calibration_windows(model: Path, text: str, count: int, announce: Any = None) -> Tensor:
    """Tokens [windows, length] of a text file, or of the text that comes with the package ("builtin").

    Raises:
        UsageError: no such file, it is too short, or `count` is too small.
    """
    if count < _LEAST:
        raise UsageError(f"--calibration-tokens {count}: too few; at least {_LEAST} are needed, {TOKENS} are good")
    if text == BUILTIN:
        content = builtin_text()
    else:
        path = Path(text).expanduser()
        if not path.is_file():
            raise UsageError(f"--calibrate {text}: no such text file; give one, or {BUILTIN!r}")
        content = spread_text(path, max(_MOST_BYTES, 16 * count))
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


def spread_text(path: Path, most: int) -> str:
    """A file in UTF-8: all of it, or of one of more than `most` bytes that much in pieces from all over it.

    Raises:
        ModelError: it cannot be read, or is no such text.
    """
    pieces = []
    begin = 0
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            count, length = (1, size) if size <= most else (_PIECES, most // _PIECES)
            for number in range(count):
                begin = (size - length) * number // max(count - 1, 1)
                file.seek(begin)
                piece = file.read(length)
                # A piece can begin and end inside a character: that is left out.
                inside = 0
                while begin and inside < 3 and piece[inside : inside + 1] and piece[inside] & 0xC0 == 0x80:
                    inside += 1
                begin += inside
                pieces.append(codecs.getincrementaldecoder("utf-8")().decode(piece[inside:], final=count == 1))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        where = begin + error.start
        raise ModelError(f"{path}: not a text in UTF-8 (byte {where} is 0x{error.object[error.start]:02x})") from None
    return "\n\n".join(pieces)


def builtin_text() -> str:
    """English and code: this package's own sources, of which a good half is prose."""
    folder = Path(anyaccel.__file__).parent
    return "\n\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))
