# SPDX-License-Identifier: Apache-2.0
"""Packed models in the user's cache folder: what is read instead of packing again, and instead of parsing anything big.

`<cache folder>/packed/<model>-<key>/` has `weights` (one block, as it is in memory) and `model.json` (the specs, the
configs, the shapes, checksums of the weights and one of itself). The key is made of what `identity` tells of the
source's files, the precision, the rank and the version of the layout; packed weights are the same for every
instruction set. Entries are made beside and renamed, under a lock, by `saving` while the model is at work already; the
folder is the user's own (0700).

The weights are mapped where that is safe (csrc/llm/decoder/weight_file.h), else read, and checked in full each time: a
checksum is computed as they come. Whatever does not fit is made again. What goes: entries whose source has changed or
is gone, then the least recently used ones above ANYACCEL_PACKED_CACHE_BYTES.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyaccel import env
from anyaccel._version import __version__
from anyaccel.inference.checkpoints.cache_lock import locked, remove_if_free
from anyaccel.inference.checkpoints.gguf_types import HELD
from anyaccel.inference.checkpoints.identity import has_changed, identity, source_path
from anyaccel.inference.spec import decoder as spec

logger = logging.getLogger(__name__)

# Raise it when the packed layout, how formats are chosen or what `model.json` says changes.
VERSION = 8
_WEIGHTS = "weights"
_MODEL = "model.json"
_SPARE_DISK = 1 << 30  # bytes that are left free


def _version() -> str:
    """A version of entries: it changes with their layout, this package, the fields of specs and GGUF's formats."""
    kinds = [each for each in vars(spec).values() if dataclasses.is_dataclass(each)]
    fields = ",".join(name for kind in kinds for name in kind.__dataclass_fields__)
    formats = ",".join(f"{kind} {held.format}" for kind, held in HELD.items())
    return f"{VERSION} {__version__} {hashlib.blake2b(f'{fields} {formats}'.encode(), digest_size=4).hexdigest()}"


class PackedModel:
    """The place of one packed model; it may or may not be there.

    Args:
        source: the model's folder or file.
        what: all else that decides about the packed weights, as JSON values.
    """

    def __init__(self, source: Path, what: Mapping[str, Any]) -> None:
        self.made_from = {"source": identity(source), "version": _version(), **what}
        text = json.dumps(self.made_from, sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.root = env.cache_dir() / "packed"
        self.folder = self.root / f"{source_path(source).stem}-{key}"
        self.weights = self.folder / _WEIGHTS
        self._lock = self.root / f"{self.folder.name}.lock"

    def load(self) -> dict[str, Any] | None:
        """What `save` was given; None when there is no entry, or one that is damaged or of another source."""
        found = _read_model(self.folder / _MODEL)
        if found is None or found.get("made_from") != self.made_from:
            return None
        try:
            if self.weights.stat().st_size != found["weight_bytes"]:
                return None
            os.utime(self.folder / _MODEL)  # when it was last used
        except OSError:
            return None
        return found

    @contextmanager
    def locked(self, check: Callable[[], object] | None = None) -> Iterator[None]:
        """One process makes the entry; others wait.

        Args:
            check: called while it waits; what it raises ends the wait.

        Raises:
            OSError: the cache folder cannot be used.
            ModelError: another process does not come to an end.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self._lock, check):
            yield

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be kept at all."""
        disk = os.statvfs(self.root)
        room = disk.f_bavail * disk.f_frsize
        return size <= env.ANYACCEL_PACKED_CACHE_BYTES.get() and size + _SPARE_DISK < room

    def save(self, model: Mapping[str, Any], size: int, write: Callable[[int], Sequence[int]]) -> None:
        """Make the entry; the caller has the lock.

        Args:
            model: JSON values that `load` gives back.
            size: of the weights, in bytes.
            write: writes them to a descriptor and returns their checksums.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        import shutil
        import tempfile

        for left in self.root.glob(f".{self.folder.name}-*"):  # of a process that was killed; the lock is ours
            shutil.rmtree(left, ignore_errors=True)
        self.remove()
        prune(self.root, size)
        temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.root))  # mode 0700
        try:
            with (temporary / _WEIGHTS).open("wb") as file:
                checksums = write(file.fileno())
            content = {**model, "made_from": self.made_from, "weight_bytes": size, "checksums": checksums}
            text = json.dumps(content)
            (temporary / _MODEL).write_text(f"{_digest(text)}\n{text}")
            temporary.rename(self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def remove(self) -> None:
        import shutil

        shutil.rmtree(self.folder, ignore_errors=True)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_model(path: Path) -> dict[str, Any] | None:
    try:
        digest, _, text = path.read_text().partition("\n")
        found = json.loads(text) if digest == _digest(text) else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_current(model: Mapping[str, Any]) -> bool:
    try:
        return model["made_from"]["version"] == _version() and not has_changed(model["made_from"]["source"])
    except (OSError, KeyError, TypeError):
        return False


def prune(root: Path, coming: int = 0) -> None:
    """Remove what has no source any more, then the least recently used entries until `coming` bytes fit the bound.

    An entry that somebody makes at the moment is left alone; one that somebody reads is read to its end.
    """
    kept: list[tuple[float, int, Path]] = []
    for folder in root.iterdir():
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        model = _read_model(folder / _MODEL)
        if model is None or not _is_current(model):
            remove_if_free(folder)
            continue
        with contextlib.suppress(OSError):
            kept.append(((folder / _MODEL).stat().st_mtime, int(model["weight_bytes"]), folder))
    total = coming + sum(size for _, size, _ in kept)
    for _, size, folder in sorted(kept):
        if total <= env.ANYACCEL_PACKED_CACHE_BYTES.get():
            return
        logger.info("%s: removed, the least recently used packed model", folder)
        remove_if_free(folder)
        total -= size
