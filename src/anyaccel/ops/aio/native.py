# SPDX-License-Identifier: Apache-2.0
"""The ctypes declarations of the library of csrc/aio."""

from __future__ import annotations

import ctypes
from typing import Any

from anyaccel.ops.builders.aio_library import AsyncIOLibraryBuilder

# In the order of Engine in csrc/aio/queue.h.
ENGINES = ("auto", "io_uring", "linux_aio", "threads")

# In the order of Step and Leftover in csrc/aio/file.h.
STEPS = (
    "", "opening it", "looking at it", "reserving space", "reading", "writing", "syncing it", "renaming it", "reading",
    "",
)  # fmt: skip
END_OF_FILE, CANCELLED = 8, 9
LEFTOVERS = (
    "the file is as it was before",
    "the file was removed",
    "the file was cut off where this write began",
    "the content of that range is undefined now",
)

# Flags of anyaccel_aio_submit().
WRITE, ATOMIC, CACHED = 1, 2, 4


class FileSegment(ctypes.Structure):
    """Memory for a range of a file."""

    _fields_ = (("offset", ctypes.c_int64), ("address", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Status(ctypes.Structure):
    """The result of a request."""

    _fields_ = (
        ("step", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("leftover", ctypes.c_int32),
        ("fell_back", ctypes.c_int32),
    )


_library: ctypes.CDLL | None = None


def bind(library: ctypes.CDLL) -> None:
    """Use this library from now on."""
    global _library
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "create": (ctypes.c_int, (i64, ctypes.c_uint32, ctypes.c_uint32, i32, i32, pointer)),
        "destroy": (None, (pointer,)),
        "engine": (i32, (pointer,)),
        "submit": (ctypes.c_int, (pointer, i64, ctypes.c_char_p, i32, pointer, ctypes.c_size_t, i32, pointer)),
        "wait": (ctypes.c_int, (pointer, i64, i32, pointer)),
        "forget": (None, (pointer, i64)),
        "cancel": (ctypes.c_int, (pointer, i64)),
        "progress": (i64, (pointer, i64)),
        "cached": (i64, (ctypes.c_int, i64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"anyaccel_aio_{name}")
        function.restype, function.argtypes = result, arguments
    _library = library


def native() -> ctypes.CDLL:
    """The library; the first call loads it."""
    if _library is None:
        bind(AsyncIOLibraryBuilder().load())
    assert _library is not None
    return _library


def cached_bytes(descriptor: int, size: int) -> int:
    """How many of the first `size` bytes of an open file are in the page cache; -1 if the kernel does not tell."""
    found: int = native().anyaccel_aio_cached(descriptor, size)
    return found
