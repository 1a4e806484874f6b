# SPDX-License-Identifier: Apache-2.0
"""A memory-mapped file whose pages can be dropped from this process after they have been read."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.validation import open_file


class MappedFile:
    """A memory-mapped file, of which only the needed pages are in memory.

    If the file is shortened while it is read, the process ends (SIGBUS), as with every mapping.
    """

    _libc: Any = None

    def __init__(self, path: Path) -> None:
        self.path = path
        libc = self._load_libc()
        try:
            with open_file(path) as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise ModelError(f"{path}: the file is empty")
                flags = mmap.MAP_PRIVATE
                address = libc.mmap(None, self.size, mmap.PROT_READ, flags, file.fileno(), 0)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
        if address in (None, ctypes.c_void_p(-1).value):
            raise ModelError(f"{path}: cannot be mapped ({os.strerror(ctypes.get_errno())})")
        self.address: int = address
        self._close = weakref.finalize(self, libc.munmap, address, self.size)

    @classmethod
    def _load_libc(cls) -> Any:
        if cls._libc is None:
            libc: Any = ctypes.CDLL(None, use_errno=True)
            size, offset = ctypes.c_size_t, ctypes.c_int64
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset]
            libc.munmap.argtypes = [ctypes.c_void_p, size]
            libc.madvise.argtypes = [ctypes.c_void_p, size, ctypes.c_int]
            cls._libc = libc
        return cls._libc

    def close(self) -> None:
        """Unmaps the file: addresses in it must not be used any more."""
        self._close()

    def bytes(self, begin: int, length: int) -> memoryview:
        """A part of the file; the caller has checked that it is inside."""
        return memoryview((ctypes.c_ubyte * length).from_address(self.address + begin)).cast("B").toreadonly()

    def will_need(self, begin: int, end: int) -> None:
        self._advise(begin, end, mmap.MADV_WILLNEED)

    def drop(self, begin: int, end: int) -> None:
        """Drop the pages in between from this process's memory; they stay in the page cache."""
        page = mmap.PAGESIZE
        if end >= self.size:
            end += -end % page
        self._advise(-(-begin // page) * page, end // page * page, mmap.MADV_DONTNEED)

    def _advise(self, begin: int, end: int, advice: int) -> None:
        begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and self._close.alive:
            self._libc.madvise(self.address + begin, end - begin, advice)
