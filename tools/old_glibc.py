#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes libraries to link with in place of the C library's, so that what is linked runs with glibc 2.28 and later.

    python tools/old_glibc.py build/wheels/x86_64/glibc x86_64-linux-gnu-g++

A program asks for each function by its name and a version, which the linker takes from the library that it finds: the
newest. These have the same names without code, each in its newest version up to 2.28 only, and of libraries that
glibc 2.34 has moved into libc.so.6 the names that moved. A function that 2.28 did not have is not there, so linking
fails; old_glibc.cpp has those that headers and libstdc++.a need. Printed are the flags to link with.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NEWEST = (2, 28)
# Names of these that moved into libc.so.6 were in these libraries before.
MOVED = {
    "libpthread.so.0": ("pthread_", "sem_"),
    "libdl.so.2": ("dl",),
    "librt.so.1": ("shm_", "timer_", "aio_", "mq_"),
}
Versions = dict[str, dict[tuple[int, ...], str]]  # of a name: type of the symbol by version


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _symbols(library: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, version and type of what a library defines, private names left out."""
    table = subprocess.run(["readelf", "--dyn-syms", "-W", library], check=True, capture_output=True, text=True).stdout
    for line in table.splitlines():
        found = re.search(r" (FUNC|IFUNC|OBJECT|NOTYPE) .* DEFAULT +(?!UND|ABS)\w+ (\w+)@@?GLIBC_([\d.]+)$", line)
        if found:
            kind, name, version = found.groups()
            yield name, _number(version), "object" if kind == "OBJECT" else "function"


def choose(symbols: Iterator[tuple[str, tuple[int, ...], str]]) -> dict[str, tuple[tuple[int, ...], str, str | None]]:
    """Of each name that glibc 2.28 had: the version to ask for, its type, and the library that it has left since."""
    every: Versions = {}
    for name, version, kind in symbols:
        every.setdefault(name, {})[version] = kind
    chosen: dict[str, tuple[tuple[int, ...], str, str | None]] = {}
    for name, versions in every.items():
        old = [version for version in versions if version[:2] <= NEWEST]
        if not old:
            continue
        moved = None
        if max(versions) > NEWEST:
            moved = next((library for library, prefixes in MOVED.items() if name.startswith(prefixes)), None)
        chosen[name] = (max(old), versions[max(old)], moved)
    return chosen


def _library(folder: Path, compiler: str, name: str, symbols: dict[str, tuple[tuple[int, ...], str]]) -> Path:
    """A library of these names, each with one version, and no code."""
    source, script, made = folder / f"{name}.s", folder / f"{name}.map", folder / name
    lines = [".text"]
    for symbol, (_, kind) in sorted(symbols.items()):
        # The size is that of a pointer: only programs, which copy objects, ask for it.
        lines += [f".globl {symbol}", f".type {symbol}, %{kind}", f".size {symbol}, 8", f"{symbol}: .skip 8"]
    lines.append('.section .note.GNU-stack,"",%progbits')
    source.write_text("\n".join([*lines, ""]))
    nodes = []
    for version in sorted({version for version, _ in symbols.values()}):
        names = sorted(symbol for symbol, (its, _) in symbols.items() if its == version)
        nodes.append(f"GLIBC_{'.'.join(map(str, version))} {{ global: {'; '.join(names)}; }};")
    script.write_text("\n".join([*nodes, ""]))
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    return made


def make(folder: Path, compiler: str) -> list[str]:
    """The libraries in `folder`, for the machine that `compiler` (a g++) compiles for; flags to link with.

    subprocess.CalledProcessError where the compiler fails, RuntimeError where its C library is not glibc.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)

    def real(name: str) -> str:
        found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        return found.stdout.strip()

    machine = subprocess.run([compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout.partition(
        "-"
    )[0]
    loader = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}.get(machine)
    if loader is None or "/" not in real("libc.so.6"):
        raise RuntimeError(f"{compiler} compiles for {machine}: wheels are for x86_64 and aarch64, with glibc")
    pieces: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {}
    for name in ("libc.so.6", "libm.so.6", loader):
        for symbol, (version, kind, moved) in choose(_symbols(real(name))).items():
            pieces.setdefault(moved or name, {})[symbol] = (version, kind)
    made = {name: _library(folder, compiler, name, symbols) for name, symbols in pieces.items()}

    extra = folder / "old_glibc.o"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, "-std=c++20", "-O2", "-fPIC", "-Wall", "-c", str(source), "-o", str(extra)], check=True)
    archive = folder / "libold_glibc.a"
    archive.unlink(missing_ok=True)
    ar = subprocess.run([compiler, "-print-prog-name=ar"], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([ar, "rcs", str(archive), str(extra)], check=True)

    # What -lc, -lm and -lpthread find; libc_nonshared.a is glibc's own part of each library (atexit).
    others = " ".join(str(made[name]) for name in (*MOVED, loader) if name in made)
    wanted = f"{made['libc.so.6']} {archive} {real('libc_nonshared.a')} AS_NEEDED ( {others} )"
    for name in ("libc.so", "libpthread.so", "libdl.so", "librt.so"):
        (folder / name).write_text(f"GROUP ( {wanted} )\n")
    (folder / "libm.so").unlink(missing_ok=True)
    (folder / "libm.so").symlink_to("libm.so.6")
    # Names of archives are nobody else's: a process may have another libstdc++ beside this one.
    return [f"-L{folder}", "-static-libstdc++", "-Wl,--exclude-libs,ALL"]


if __name__ == "__main__":
    print(" ".join(make(Path(sys.argv[1]), sys.argv[2])))
