# SPDX-License-Identifier: Apache-2.0
"""Finds an installed memory allocator that can be preloaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.topology.files import names


@dataclass(frozen=True)
class _Allocator:
    """The names of a library, and how to install it.

    Attributes:
        files: file names, the best first.
        advice: how to install it.
    """

    files: tuple[str, ...]
    advice: str


_ALLOCATORS = {
    "tcmalloc": _Allocator(
        ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
        "apt install libtcmalloc-minimal4 (dnf install gperftools-libs, conda install gperftools)",
    ),
    "jemalloc": _Allocator(
        ("libjemalloc.so.2", "libjemalloc.so"),
        "apt install libjemalloc2 (dnf install jemalloc, conda install jemalloc)",
    ),
}


def find_allocator(name: str, environ: Mapping[str, str], root: str = "", prefix: str | None = None) -> str:
    """Path of an allocator's library; "" for the default one.

    Looks in the conda environment, the Python environment, LD_LIBRARY_PATH, what ldconfig found, and the standard
    folders, in this order.

    Args:
        name: one of `options.ALLOCATORS`.
        root: where the system is; tests give a tree of their own.
        prefix: the Python environment; that of this process when left out.

    Raises:
        UsageError: it is not installed; says what to install.
    """
    if name == "default":
        return ""
    allocator = _ALLOCATORS[name]
    for path in _candidates(allocator, environ, root, sys.prefix if prefix is None else prefix):
        # LD_PRELOAD is divided at blanks and colons.
        if not set(path) & set(" :") and _is_loadable(path):
            return path
    raise UsageError(f"--malloc {name}: no {allocator.files[0]} on this machine; {allocator.advice}, or leave it out")


def preload(path: str, environ: Mapping[str, str]) -> str:
    """LD_PRELOAD with this library before those that are there."""
    others = [part for part in environ.get("LD_PRELOAD", "").replace(" ", ":").split(":") if part and part != path]
    return ":".join([path, *others])


def _candidates(allocator: _Allocator, environ: Mapping[str, str], root: str, prefix: str) -> Iterator[str]:
    environments = [environ.get("CONDA_PREFIX", ""), prefix if prefix != sys.base_prefix else ""]
    folders = [f"{folder}/lib" for folder in environments if folder]
    folders += [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    yield from _in_folders(allocator, folders)
    yield from _in_cache(allocator, root)
    triplet = getattr(sys.implementation, "_multiarch", "")
    standard = ("/usr/local/lib", f"/usr/lib/{triplet}", f"/lib/{triplet}", "/usr/lib64", "/lib64", "/usr/lib", "/lib")
    yield from _in_folders(allocator, [root + folder for folder in standard])


def _in_folders(allocator: _Allocator, folders: list[str]) -> Iterator[str]:
    for folder in folders:
        there = set(names(folder))
        yield from (os.path.join(folder, file) for file in allocator.files if file in there)


def _in_cache(allocator: _Allocator, root: str) -> Iterator[str]:
    """Paths in the cache of ldconfig: a table, then texts that end with a zero byte."""
    try:
        with open(f"{root}/etc/ld.so.cache", "rb") as file:
            texts = file.read().split(b"\0")
    except OSError:
        return
    for name in allocator.files:
        ending = f"/{name}".encode()
        yield from (root + os.fsdecode(text) for text in texts if text.startswith(b"/") and text.endswith(ending))


def _is_loadable(path: str) -> bool:
    """Whether it is a library for the processor that this Python was built for."""
    try:
        with open(path, "rb") as library, open("/proc/self/exe", "rb") as own:
            one, other = library.read(20), own.read(20)
    except OSError:
        return False
    # Class and byte order, then the machine.
    return one[:4] == b"\x7fELF" and (one[4:6], one[18:20]) == (other[4:6], other[18:20])
