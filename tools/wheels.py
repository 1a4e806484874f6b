#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the sdist and the manylinux wheels of x86_64 and aarch64 (`make wheels`), the latter by a cross compiler.

    python tools/wheels.py dist --pythons 3.11 3.12

Runs in an environment with what builds the package, auditwheel and twine. A wheel of Python 3.12 is that of all later
ones. What is in `dist` of this package before is removed. Fails where auditwheel finds that a wheel wants more than
manylinux_2_28, where a wheel is 15 MB or larger, and where twine finds fault with a description.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import setuptools_scm

import old_glibc

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = old_glibc.NEWEST
LARGEST = 15_000_000  # bytes


def compiler(machine: str) -> str:
    """The g++ for a machine; this one's own may be without the name of the machine."""
    for name in (f"{machine}-linux-gnu-g++", *(("g++",) if machine == platform.machine() else ())):
        if shutil.which(name):
            return name
    sys.exit(
        f"wheels: no {machine}-linux-gnu-g++; on Debian: apt-get install g++-{machine.replace('_', '-')}-linux-gnu"
    )


def interpreter(version: str) -> str:
    """A Python of this version; of pyenv's, those too that are not on the PATH."""
    found = [
        shutil.which(f"python{version}"),
        *map(str, Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")),
    ]
    for python in filter(None, found):
        # A pyenv's program is there for each version that is installed, and fails for those that are not chosen.
        done = subprocess.run(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if done.stdout.strip() == version:
            return python
    sys.exit(f"wheels: there is no Python {version} with its headers; --pythons names the versions to build for")


def build(machine: str, python: str, work: Path) -> Path:
    """The wheel of `python` (a program) for a machine, with the tag linux_MACHINE."""
    gxx = compiler(machine)
    tag = subprocess.run(
        [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    folder = work / machine / tag
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    flags = " ".join([*old_glibc.make(work / machine / "glibc", gxx), "-Wl,-z,relro,-z,now"])
    settings = {
        # One for every Python: only the bindings are compiled again.
        "build-dir": str(work / machine / "build"),
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": flags,
        "cmake.define.CMAKE_CXX_COMPILER": gxx,
    }
    if machine != platform.machine():
        settings["cmake.define.CMAKE_TOOLCHAIN_FILE"] = str(ROOT / "tools" / "cross.cmake")
        settings["cmake.define.ANYACCEL_CROSS"] = machine
    code = f"from scikit_build_core.build import build_wheel; build_wheel({str(folder)!r}, {settings!r})"
    environ = {
        **os.environ,
        # What builds the package is plain Python, so that of another version takes it from here.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith("site-packages")),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        # How the modules' names end: of Python's own machine, were it not said.
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag.removeprefix('cp')}-{machine}-linux-gnu.so",
    }
    log = folder / "log"
    with log.open("wb") as file:
        done = subprocess.run([python, "-c", code], cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{log.read_text()[-4000:]}\nwheels: the wheel of {tag} for {machine} cannot be built")
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_symbols(wheel: Path) -> None:
    """Exits where a library takes a function that has no version: one that glibc 2.28 does not have, so linking found
    none. (The linker allows it for the sake of Python's own.)"""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            if not name.endswith(".so"):
                continue
            if ".cpython-" in name and wheel.stem.rpartition("linux_")[2] not in name:
                sys.exit(f"wheels: {name} in {wheel.name} is named for another machine")
            library = file.extract(name, folder)
            command = ["readelf", "--dyn-syms", "-W", library]
            table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            wanted = re.findall(r" GLOBAL +DEFAULT +UND +(\S+)$", table, re.MULTILINE)
            unknown = [each for each in wanted if not each.startswith(("Py", "_Py"))]
            if unknown:
                sys.exit(f"wheels: {name} takes what glibc 2.28 does not have: {', '.join(unknown)}")


def tagged(wheel: Path) -> Path:
    """The same wheel with the manylinux tag that auditwheel finds right. Exits where that is none, or too new."""
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r'consistent with\s+the\s+following\s+platform\s+tag:\s+"(manylinux_(\d+)_(\d+)_\w+)"', shown)
    if found is None or (int(found[2]), int(found[3])) > NEWEST_GLIBC:
        sys.exit(f"{shown}\nwheels: {wheel.name} is not one of manylinux_{'_'.join(map(str, NEWEST_GLIBC))} or older")
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", found[1], str(wheel)]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    return wheel.with_name(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12"], metavar="VERSION")
    parser.add_argument("--machines", nargs="+", default=MACHINES, choices=MACHINES)
    parser.add_argument("--no-sdist", action="store_true", help="wheels only")
    options = parser.parse_args()
    pythons = [interpreter(version) for version in options.pythons]
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("anyaccel-*.whl"), *folder.glob("anyaccel-*.tar.gz")):
        old.unlink()
    os.chdir(ROOT)
    # All of one version, also where somebody commits meanwhile.
    os.environ.setdefault("SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ANYACCEL", setuptools_scm.get_version(str(ROOT)))
    made: list[Path] = []
    if not options.no_sdist:
        from scikit_build_core.build import build_sdist

        made.append(folder / build_sdist(str(folder)))
    for machine in options.machines:
        for python in pythons:
            built = build(machine, python, ROOT / "build" / "wheels")
            check_symbols(built)
            wheel = tagged(built)
            made.append(Path(shutil.copy(wheel, folder)))
            size = made[-1].stat().st_size
            if size >= LARGEST:
                sys.exit(f"wheels: {wheel.name} has {size / 1e6:.1f} MB, and {LARGEST / 1e6:.0f} MB are too much")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, made)], check=True)
    for file in made:
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
