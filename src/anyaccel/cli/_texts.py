# SPDX-License-Identifier: Apache-2.0
"""What the commands about texts share: their model's options, and the files that texts come from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.cli._model_options import model_path, usual_dtype
from anyaccel.cli._screen import keep_bytes
from anyaccel.errors import UsageError
from anyaccel.inference.options import DTYPES, GROUP_SIZES, ModelOptions, dtype_name
from anyaccel.validation import error_text

if TYPE_CHECKING:
    from anyaccel.cli._parser import Parser


def add_options(parser: Parser) -> None:
    """Add the options that choose and load a model."""
    add = parser.add_argument
    add("--model", metavar="PATH", required=True, help="Hugging Face model folder")
    add(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        help="precision of the weights; int8 and int4 are for the weights only; auto: that of the file (default: auto "
        "for quantised weights, bf16 for others)",
    )
    add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=32,
        help="number of weights that share a scale in int4 (default: 32)",
    )
    add("--threads", type=int, default=0, metavar="N", help="threads (default: the CPUs it may use)")


def options_of(options: argparse.Namespace) -> tuple[Path, ModelOptions]:
    """The model's folder, and how it is loaded."""
    path = model_path(options.model)
    dtype = options.dtype or usual_dtype(path)
    return path, ModelOptions(dtype=dtype, group_size=options.group_size, threads=options.threads)


def read_texts(files: list[str]) -> list[str]:
    """The texts of files, one a line; in files named *.jsonl a line is a string, or an object with a "text".

    Raises:
        UsageError: a file cannot be read, a line is no such JSON, or there is no text.
    """
    texts = [text for file in files or ["-"] for text in _texts_of(file)]
    if not texts:
        raise UsageError(f"{', '.join(files) or 'standard input'}: there is no text")
    return texts


def _texts_of(file: str) -> Iterator[str]:
    if file == "-":
        whole = keep_bytes(sys.stdin).read()
    else:
        try:
            whole = Path(file).expanduser().read_text(errors="surrogateescape")
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
    # Not splitlines: it would also end a text at a form feed or at U+2028, which JSON has in strings.
    for number, line in enumerate(whole.split("\n"), 1):
        if line.strip():
            yield _text_of(line, f"{file}, line {number}") if file.endswith(".jsonl") else line


def _text_of(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: {error_text(error)}") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UsageError(f'{where}: must be a string, or an object with a "text"')
    return text
