# SPDX-License-Identifier: Apache-2.0
"""The prefix cache on disk: keys and values of ended conversations, so that they go on after a restart. Torch only in
the threads that read and write.

A page is a file, `<folder>/<model>/<key>`. The key hashes the page's tokens and the key of the page before it, so
that a file is found by all tokens up to its end; the model's folder is named by its weights and precision. Behind the
page a file has its key and a checksum. What is damaged, foreign or gone is passed over.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel._version import __version__
from anyaccel.errors import AioError, UsageError
from anyaccel.inference.checkpoints.identity import weights_of
from anyaccel.inference.spec.decoder import PAGE

if TYPE_CHECKING:
    import torch

    from anyaccel.inference.options import ModelOptions

logger = logging.getLogger("anyaccel.serve")

_LAYOUT = 2  # raise it when the layout of pages in memory changes
_MAGIC = b"anyaccel"
_TRAILER = struct.Struct("<8s16sI4x")
_ALIGNED = 4096
_MOST_QUEUED = 512 << 20  # bytes that wait to be written
_KEY_BYTES = 16


@dataclass(frozen=True)
class ReadPages:
    """The first pages of a text.

    Attributes:
        memory: keeps the pages.
    """

    memory: torch.Tensor
    addresses: list[int]


def page_keys(tokens: Sequence[int], pages: int) -> list[str]:
    """The keys of the first pages of a text."""
    keys = []
    before = b""
    for first in range(0, pages * PAGE, PAGE):
        part = struct.pack(f"<{PAGE}q", *tokens[first : first + PAGE])
        before = hashlib.blake2b(before + part, digest_size=_KEY_BYTES).digest()
        keys.append(before.hex())
    return keys


def model_key(path: Path, options: ModelOptions, page_bytes: int) -> str:
    """Names the folder of a model: by its weights, config and precision, and what decides about a page's bytes."""
    config = path / "config.json"  # other rotary positions, such as YaRN's, are other keys of the same weights
    about = [
        _LAYOUT,
        __version__,
        weights_of(path),
        weights_of(Path(options.lora).expanduser()) if options.lora else "",
        config.read_text(encoding="utf-8") if config.is_file() else "",
        options.dtype,
        options.group_size,
        options.kv_cache,
        page_bytes,
    ]
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=_KEY_BYTES).hexdigest()


class DiskCache:
    """The files of one model. `known` may be called in any thread, `read` in any but the loop's; writes have their own.

    Args:
        folder: of all models; files of others count too.
        most_bytes: of all files; those that were used longest ago are deleted first.

    Raises:
        UsageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, model: str, page_bytes: int, most_bytes: int) -> None:
        self._folder = folder / model
        self._page_bytes = page_bytes
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, int] = OrderedDict()  # the least recently used first -> bytes
        self._bytes = 0
        self._waiting: set[str] = set()  # keys of pages that are to be written
        self._is_full = False
        self._writer = ThreadPoolExecutor(1, "anyaccel-disk-cache")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = []
            for each in folder.glob("*/*"):
                if each.suffix == ".part":  # of a server that was killed
                    each.unlink(missing_ok=True)
                elif each.is_file():
                    status = each.stat()
                    found.append((status.st_mtime, each, status.st_size))
            if not os.access(self._folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise UsageError(f"--cache-dir {folder}: {error.strerror}") from None
        for _, each, size in sorted(found):
            self._files[each] = size
            self._bytes += size
        self._writer.submit(importlib.import_module, "anyaccel.ops.aio.handle")  # torch, before the first read waits

    @property
    def pages(self) -> int:
        """How many pages of this model there are."""
        return sum(each.parent == self._folder for each in self._files)

    def known(self, keys: Sequence[str]) -> int:
        """How many of these pages, from the first on, can be read."""
        with self._lock:
            return next((i for i, key in enumerate(keys) if self._folder / key not in self._files), len(keys))

    def kept(self, keys: Sequence[str]) -> int:
        """How many of these pages, from the first on, are on the disk, or wait to be written."""
        with self._lock:
            missing = (i for i, k in enumerate(keys) if k not in self._waiting and self._folder / k not in self._files)
            return next(missing, len(keys))

    def close(self) -> None:
        """Write what waits."""
        self._writer.shutdown(wait=True)

    # Reading ----------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[str]) -> ReadPages | None:
        """The pages from the first on, as far as they are good; None: not even the first one is."""
        import torch

        from anyaccel.ops.aio.handle import aio_handle

        size = self._page_bytes + _TRAILER.size
        stride = -(-size // _ALIGNED) * _ALIGNED
        memory = torch.zeros(len(keys) * stride, dtype=torch.uint8)
        handle = aio_handle(intra_op_parallelism=2)
        begun = 0
        with contextlib.suppress(AioError, OSError, UsageError):  # what has not come has no trailer
            for key in keys:
                handle.async_pread(memory[begun * stride : begun * stride + size], str(self._folder / key))
                begun += 1
        with contextlib.suppress(AioError):
            handle.wait()
        addresses = []
        view = memoryview(memory.numpy())  # type: ignore[arg-type]  # an array of numpy is a buffer
        for place, key in enumerate(keys):
            page = view[place * stride : place * stride + size]
            if not self._is_good(page, key):
                self._forget(key)
                break
            addresses.append(memory.data_ptr() + place * stride)
        for key in keys[: len(addresses)]:
            self._touch(key)
        return ReadPages(memory, addresses) if addresses else None

    def _is_good(self, page: memoryview, key: str) -> bool:
        magic: bytes
        own: bytes
        checksum: int
        magic, own, checksum = _TRAILER.unpack(page[self._page_bytes :])
        return magic == _MAGIC and own == bytes.fromhex(key) and zlib.crc32(page[: self._page_bytes]) == checksum

    def _touch(self, key: str) -> None:
        path = self._folder / key
        with self._lock, contextlib.suppress(KeyError):
            self._files.move_to_end(path)
        with contextlib.suppress(OSError):
            os.utime(path)

    def _forget(self, key: str) -> None:
        """Delete a file that is not what it should be."""
        path = self._folder / key
        logger.warning("prefix cache: %s is damaged or gone, and is passed over", path)
        self._delete(path)

    def _delete(self, path: Path) -> None:
        with self._lock:
            self._bytes -= self._files.pop(path, 0)
        with contextlib.suppress(OSError):
            path.unlink()

    # Writing ----------------------------------------------------------------------------------------------

    def write(self, keys: Sequence[str], addresses: Sequence[int]) -> bool:
        """Write pages in the background; their memory may change once this returns. False: too much waits already."""
        if self._waiting and (len(self._waiting) + len(keys)) * self._page_bytes > _MOST_QUEUED:
            return False
        pages = [ctypes.string_at(address, self._page_bytes) for address in addresses]
        with self._lock:
            self._waiting.update(keys)
        self._writer.submit(self._write, list(keys), pages)
        return True

    def _write(self, keys: list[str], pages: list[bytes]) -> None:
        try:
            self._write_files(keys, pages)
            self._is_full = False
        except (AioError, OSError) as error:
            if not self._is_full:  # said once, not with every request
                logger.warning("prefix cache: cannot write to %s: %s", self._folder, error)
            self._is_full = True
        except Exception:
            logger.exception("prefix cache: writing to %s has failed", self._folder)
        finally:
            with self._lock:
                self._waiting.difference_update(keys)

    def _write_files(self, keys: list[str], pages: list[bytes]) -> None:
        import torch

        from anyaccel.ops.aio.handle import aio_handle

        handle = aio_handle(intra_op_parallelism=1)
        begun: list[tuple[Path, Path]] = []
        try:
            for key, page in zip(keys, pages, strict=True):
                path = self._folder / key
                with self._lock:
                    if path in self._files:
                        continue
                whole = page + _TRAILER.pack(_MAGIC, bytes.fromhex(key), zlib.crc32(page))
                tensor = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
                part = path.with_suffix(".part")
                begun.append((part, path))
                handle.async_pwrite(tensor, str(part))
            handle.wait()
        except BaseException:
            for part, _ in begun:
                part.unlink(missing_ok=True)
            raise
        for part, path in begun:
            part.rename(path)
            with self._lock:
                self._files[path] = self._page_bytes + _TRAILER.size
                self._bytes += self._files[path]
        self._free_excess()

    def _free_excess(self) -> None:
        while True:
            with self._lock:
                if self._bytes <= self._most_bytes or not self._files:
                    return
                oldest = next(iter(self._files))
            self._delete(oldest)


def open_disk_cache(
    path: Path, options: ModelOptions, folder: str, most_bytes: int, page_bytes: int, screen: Any
) -> DiskCache:
    """The cache of a model, which it tells the user of.

    Raises:
        UsageError: the folder cannot be written.
    """
    where = Path(folder).expanduser()
    made = DiskCache(where, model_key(path, options, page_bytes), page_bytes, most_bytes)
    screen.line(f"prefix cache: {made.pages * PAGE} tokens of this model in {where}")
    return made
