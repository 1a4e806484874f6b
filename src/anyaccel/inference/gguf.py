# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file, once, to a Hugging Face folder in the user's cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyaccel import env
from anyaccel.errors import ModelError

_MANIFEST = "anyaccel.json"
_FORMAT = 1  # raise it when a conversion changes, so that old ones are made again
_LOCK_SECONDS = 1800.0


def _fingerprint(source: Path) -> dict[str, object]:
    status = source.stat()
    return {"format": _FORMAT, "source": str(source), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_complete(folder: Path, fingerprint: dict[str, object]) -> bool:
    """True when the folder was made from this very file and each of its files still has its size."""
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        return False
    try:
        recorded = json.loads(manifest.read_text())
        sizes: dict[str, int] = recorded["files"]
        return recorded["made_from"] == fingerprint and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process converts at a time; the lock ends with its holder, whatever ends that."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"{path}: another process has held this lock for {_LOCK_SECONDS:.0f} s") from None
                time.sleep(0.1)
        yield


def converted(source: Path, announce: Callable[[str], object] | None = None) -> Path:
    """The folder with the converted model of the GGUF file `source`, made when it is not there yet.

    The weights are dequantised to float32 safetensors: exactly the values that the file stands for.

    Args:
        announce: called with one line before a conversion, which takes a while.

    Raises:
        ModelError: the file is no GGUF file, is damaged, or has an architecture that transformers cannot read.
    """
    source = source.resolve()
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{source}: not a GGUF file (it does not start with 'GGUF')")
    fingerprint = _fingerprint(source)
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    models = env.cache_dir() / "models"
    folder = models / f"{source.stem}-{key}"
    if _is_complete(folder, fingerprint):
        return folder
    models.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(models / f"{folder.name}.lock"):
        if not _is_complete(folder, fingerprint):  # another process may have made it meanwhile
            if announce is not None:
                announce(f"converting {source.name} once, to {folder}")
            _convert(source, folder, fingerprint)
    return folder


@contextmanager
def _one_reader() -> Iterator[None]:
    """Parse the file once: transformers does it for tokenizer, configuration and weights, 6 s each."""
    library: Any = importlib.import_module("gguf")
    original = library.GGUFReader
    library.GGUFReader = functools.cache(original)
    try:
        yield
    finally:
        library.GGUFReader = original


def _convert(source: Path, folder: Path, fingerprint: dict[str, object]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for left in folder.parent.glob(f".{folder.name}-*"):  # of a conversion that was killed; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        try:
            location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
            with _one_reader():
                tokenizer = AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
                model: Any = AutoModelForCausalLM.from_pretrained(
                    **location, dtype=torch.float32, trust_remote_code=False
                )
        except Exception as error:  # the readers raise whatever a damaged file leads them to
            raise ModelError(f"{source}: transformers cannot read this GGUF file ({error})") from error
        # The weights are plain now; transformers would refuse to save a model that still calls itself quantised.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        sizes = {file.name: file.stat().st_size for file in beside.iterdir()}
        (beside / _MANIFEST).write_text(json.dumps({"made_from": fingerprint, "files": sizes}, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
