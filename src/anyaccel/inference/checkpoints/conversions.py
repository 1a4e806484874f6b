# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file, or its tokenizer alone, once, to a Hugging Face folder in the user's cache."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from anyaccel import env
from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.cache_lock import locked, remove_if_free
from anyaccel.inference.checkpoints.identity import identity
from anyaccel.validation import open_file

logger = logging.getLogger(__name__)

_MANIFEST = "anyaccel.json"
_FORMAT = 6  # increase it when a conversion changes, so that old results are not used


# A function that fills a folder from a file, and announces what takes a while.
_Save = Callable[[Path, Path, Callable[[str], object] | None], None]


def _fingerprint(source: Path) -> dict[str, object]:
    return {"format": _FORMAT, "source": identity(source)}


def _is_complete(folder: Path, fingerprint: dict[str, object]) -> bool:
    """Whether the folder was made from exactly this file, and none of its files has changed."""
    manifest = folder / _MANIFEST
    if not manifest.is_file():
        return False
    try:
        recorded = json.loads(manifest.read_bytes())
        if recorded["made_from"] != fingerprint:
            return False
        damaged = [name for name, checksum in recorded["files"].items() if _checksum(folder / name) != checksum]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s: damaged (%s); converting again", manifest, str(error) or type(error).__name__)
        return False
    if damaged:
        logger.warning("%s: its checksum is another one; converting again", folder / damaged[0])
    return not damaged


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()


def made_once(source: Path, kind: str, announce: Callable[[str], object] | None, save: _Save) -> Path:
    source = source.resolve()
    with open_file(source) as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{source}: not a GGUF file (it does not start with 'GGUF')")
    fingerprint = _fingerprint(source)
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    parent = env.cache_dir() / kind
    folder = parent / f"{source.stem}-{key}"
    if _is_complete(folder, fingerprint):
        return folder
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(parent / f"{folder.name}.lock"):
        if not _is_complete(folder, fingerprint):  # another process may have made it meanwhile
            _make(source, folder, fingerprint, save, announce)
            _remove_former(folder, source)
    return folder


def _remove_former(folder: Path, source: Path) -> None:
    """Remove what this host has made of an earlier file at the path `source`.

    Hosts that share the cache folder need not share the file: each may have another file at the same path, and still
    use what it has made of that.
    """
    for other in folder.parent.glob(f"{glob.escape(source.stem)}-*"):
        if other == folder or not (other / _MANIFEST).is_file():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            manifest = json.loads((other / _MANIFEST).read_bytes())
            made_from = manifest["made_from"]
            here = manifest["host"] == socket.gethostname()
            if here and made_from["format"] == _FORMAT and made_from["source"]["path"] == str(source):
                remove_if_free(other)


def _make(
    source: Path,
    folder: Path,
    fingerprint: dict[str, object],
    save: _Save,
    announce: Callable[[str], object] | None,
) -> None:
    """Fill a temporary folder and rename it to `folder`."""
    for left in folder.parent.glob(f".{folder.name}-*"):  # left by a killed conversion, as we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save(source, temporary, announce)
        files = [file for file in temporary.rglob("*") if file.is_file()]
        checksums = {str(file.relative_to(temporary)): _checksum(file) for file in files}
        manifest = {"made_from": fingerprint, "host": socket.gethostname(), "files": checksums}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
