# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a GGUF file as a folder in the user's cache: ours, or where it lacks something, transformers'."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError
from anyaccel.inference.checkpoints.conversions import made_once
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.text.gguf_tokenizer import write_tokenizer
from anyaccel.validation import error_text

logger = logging.getLogger(__name__)


def converted_tokenizer(source: Path, announce: Callable[[str], object] | None = None) -> Path:
    """The folder with the tokenizer of the GGUF file `source` and its chat template, made when it is not there yet.

    Args:
        announce: called with one line before a conversion that needs transformers, which takes some seconds.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or its tokenizer is none that can be read.
        OSError: the cache cannot be written.
    """
    return made_once(source, "tokenizers", announce, convert_tokenizer)


def convert_tokenizer(source: Path, folder: Path, announce: Callable[[str], object] | None = None) -> None:
    """The tokenizer of the GGUF file `source` into the empty `folder`, by transformers where we lack something for it.

    Args:
        announce: called with one line before that.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or its tokenizer is none that can be read.
    """
    try:
        write_tokenizer(source, folder)
    except Unsupported as lacking:
        (announce or logger.warning)(f"no {lacking.feature}; transformers converts it, once")
        _tokenizer_by_transformers(source, folder)


def _tokenizer_by_transformers(source: Path, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise AnyAccelError(f"reading a GGUF file needs more packages: pip install 'anyaccel[llm]' ({error})") from None
    try:
        with one_reader():
            AutoTokenizer.from_pretrained(**location(source)).save_pretrained(folder)
    except Exception as error:  # the readers raise whatever a damaged file leads them to
        raise ModelError(
            f"{source}: transformers cannot read this GGUF file's tokenizer ({error_text(error)})"
        ) from error


@contextmanager
def one_reader() -> Iterator[None]:
    """Parse the file once, and quickly: transformers does it for tokenizer, configuration and weights, 6 s each."""
    library: Any = importlib.import_module("gguf")
    array: Any = importlib.import_module("numpy").ndarray
    originals = library.GGUFReader, library.get_tensor_name_map

    @functools.cache
    def read(path: str) -> Any:
        reader = originals[0](path)
        for field in reader.fields.values():  # as what they are, numpy.memmap, they take thrice as long to go through
            field.parts[:] = [part.view(array) for part in field.parts]
        return reader

    library.GGUFReader = read
    library.get_tensor_name_map = functools.cache(originals[1])  # asked for anew for each module of a model
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = originals


def location(source: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name, "trust_remote_code": False}
