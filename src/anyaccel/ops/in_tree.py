# SPDX-License-Identifier: Apache-2.0
"""The sources and flags of the ops in csrc/, in one place for the JIT loader and for CMake.

CMakeLists.txt runs it as a script, with csrc/ and the machine to compile for, and it prints CMake calls. So this file
imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

# Every op consists of its own files and these. All but the first are the same for every op: CMake compiles them once.
_COMMON = ("common/op_variant.cpp", "common/cpu_features.cpp", "common/parallel.cpp")


def _optimizer(name: str) -> tuple[str, ...]:
    return (f"optim/{name}.cpp", f"optim/{name}_kernels.cpp")


# Files below csrc/. All files of an op are compiled with the same flags, as simd/each_isa.h compiles the kernels for
# every instruction set within one file.
SOURCES: dict[str, tuple[str, ...]] = {
    "async_io": (
        "aio/api.cpp",
        "aio/file.cpp",
        "aio/handle.cpp",
        "aio/io_uring.cpp",
        "aio/linux_aio.cpp",
        "aio/request.cpp",
    ),
    "cpu_adagrad": _optimizer("adagrad"),
    "cpu_adam": _optimizer("adam"),
    "cpu_lion": _optimizer("lion"),
}

_FLAGS = (
    "-O3",
    "-DNDEBUG",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    # GCC would contract a*b+c into an FMA if the target has one, and results must not depend on the variant.
    "-ffp-contract=off",
    "-fno-math-errno",
)
LINK_FLAGS = ("-pthread",)


def root() -> Path:
    """The folder csrc/: beside this package in an installation, at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parents[1] / "csrc"


def sources(name: str) -> tuple[str, ...]:
    """C++ files of an op, relative to `root()`."""
    return (*SOURCES[name], *_COMMON)


def flags(machine: str | None = None) -> tuple[str, ...]:
    """Flags to compile with, the same for every file of every op. `machine`: as platform.machine(), the default."""
    # Baseline x86-64-v2: what every x86-64 machine of the last 15 years has.
    x86 = (machine or platform.machine()) in ("x86_64", "AMD64")
    return (*_FLAGS, *(("-march=x86-64-v2", "-DANYACCEL_X86") if x86 else ()))


def variant(name: str, folder: Path, machine: str | None = None) -> str:
    """A hash of all that a library of this op is built from: machine, flags, and contents of sources and headers."""
    files = [folder / file for file in sources(name)]
    folders = sorted({*(file.parent for file in files), folder / "simd"})
    headers = [header for part in folders for header in sorted(part.glob("*.h"))]
    digest = hashlib.sha256(" ".join([*flags(machine), *LINK_FLAGS]).encode())
    for file in (*files, *headers):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{machine or platform.machine()}-{digest.hexdigest()[:16]}"


def _cmake(folder: Path, machine: str | None = None) -> str:
    lines = [
        f"set(ANYACCEL_OP_FLAGS {';'.join(flags(machine))})",
        f"set(ANYACCEL_OP_LINK_FLAGS {';'.join(LINK_FLAGS)})",
    ]
    lines.append(f"anyaccel_op_common({' '.join(_COMMON[1:])})")
    lines += [f'anyaccel_op({name} "{variant(name, folder, machine)}" {" ".join(sources(name))})' for name in SOURCES]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(_cmake(Path(sys.argv[1]), *sys.argv[2:]))
