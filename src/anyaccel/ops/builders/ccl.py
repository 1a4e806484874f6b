# SPDX-License-Identifier: Apache-2.0
"""Builder of the op that calls oneCCL, and where oneCCL is on this machine."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

from anyaccel import env
from anyaccel.errors import CommError
from anyaccel.ops import in_tree
from anyaccel.ops.builder import OpBuilder

# 2021.17 and later need libccl.so.2, and 2022.2 a libfabric, which none of the wheels for CPUs contains.
PIP_LINE = 'pip install "oneccl-cpu==2021.16.*" "oneccl-cpu-devel==2021.16.*" "impi-rt==2021.16.*"'


class Installation(NamedTuple):
    """Where oneCCL is.

    Attributes:
        library: libccl.so.1.
        include: the folder with oneapi/ccl.hpp.
        fabric: libfabric's library; empty if there is none, so that only MPI can carry messages.
        mpi: Intel MPI's library; empty if there is none, so that only libfabric can.
    """

    library: Path
    include: Path
    fabric: str
    mpi: str


def find() -> Installation:
    """oneCCL in the folder that CCL_ROOT names, else among the packages of this Python.

    Raises:
        CommError: it is not there, or a part is missing.
    """
    root = env.CCL_ROOT.get()
    roots = [Path(root)] if root else _roots_of_packages()
    library = _first(roots, "lib/libccl.so.1", "lib/ccl/cpu/lib/libccl.so.1")
    if not library:
        where = f"CCL_ROOT={root} has no lib/libccl.so.1" if root else "oneCCL is not installed"
        raise CommError(f"backend ccl: {where}: {PIP_LINE}")
    include = _first(roots, "include/oneapi/ccl.hpp")
    if not include:
        raise CommError(f"backend ccl: {library} is there, the headers (oneapi/ccl.hpp) are not: {PIP_LINE}")
    if _needs_second_library(library) and not _first(roots, "lib/libccl.so.2"):
        raise CommError(f"backend ccl: {library} needs libccl.so.2, which its package does not bring: {PIP_LINE}")
    fabric = os.environ.get("CCL_OFI_LIBRARY_PATH") or _text(_first(roots, "lib/libfabric.so.1", "lib/libfabric.so"))
    mpi = os.environ.get("CCL_MPI_LIBRARY_PATH") or _text(_first(roots, "lib/libmpi.so.12"))
    return Installation(library, include.parents[1], fabric or _system_fabric(), mpi)


def _needs_second_library(library: Path) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"\0libccl.so.2\0") >= 0


def _roots_of_packages() -> list[Path]:
    """Folders that have the lib/ and include/ of the wheels: usually one, the environment's."""
    roots = []
    for package in ("oneccl-cpu", "oneccl-cpu-devel", "impi-rt", "oneccl"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            parts = file.parts
            for folder in ("lib", "include"):
                if folder in parts and file.name in ("libccl.so.1", "ccl.hpp", "libmpi.so.12", "libccl.so.2"):
                    place = Path(str(file.locate())).resolve()
                    roots.append(next(parent.parent for parent in place.parents if parent.name == folder))
                    break
    return list(dict.fromkeys(roots))


def _first(roots: list[Path], *names: str) -> Path | None:
    return next((root / name for name in names for root in roots if (root / name).exists()), None)


def _text(path: Path | None) -> str:
    return "" if path is None else str(path)


def _system_fabric() -> str:
    """libfabric of the distribution."""
    folders = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
    return _text(_first([Path(folder) for folder in folders], "libfabric.so.1"))


class CCLCommBuilder(OpBuilder):
    """Collectives of oneCCL, as `anyaccel.comm.ccl` calls them; built here against the installed oneCCL.

    Its users are groups of backend `ccl`; load() gives the plain C library.
    """

    NAME: ClassVar[str] = "deepspeed_ccl_comm"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CCL_COMM"
    ACCELERATOR: ClassVar[str] = "cpu"

    def absolute_name(self) -> str:
        """Where a prebuilt copy would be; wheels have none, since it is linked with the user's oneCCL."""
        return f"anyaccel.ops.prebuilt.{self.NAME}"

    def why_not(self) -> str:
        """Why it cannot be loaded: oneCCL is missing, or what every op needs."""
        if not sys.platform.startswith("linux"):
            return f"it needs Linux, and this is {sys.platform}"
        if not self._switched_off():
            try:
                find()
            except CommError as error:
                return str(error)
        return super().why_not()

    def sources(self) -> list[str]:
        """Its only file."""
        return [str(in_tree.root() / "ccl" / "ccl_comm.cpp")]

    def include_paths(self) -> list[str]:
        """oneCCL's headers, where it is installed."""
        try:
            return [str(find().include)]
        except CommError:
            return []

    def cxx_args(self) -> list[str]:
        """The flags of every op, without warnings, which oneCCL's headers cause."""
        return [*super().cxx_args(), "-w"]

    def extra_ldflags(self) -> list[str]:
        """Link with the library that was found, and load it from there."""
        try:
            library = find().library
        except CommError:
            return []
        return [str(library), f"-Wl,-rpath,{library.parent}"]


def why_not() -> str:
    """Why backend `ccl` cannot be used here, in one line; empty when it can. Loads nothing, builds nothing."""
    return CCLCommBuilder().why_not()
