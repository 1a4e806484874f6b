# SPDX-License-Identifier: Apache-2.0
"""Builds the native tests with GCC's or clang's sanitizers and runs them: `make sanitize`.

Each file of tests/native is linked with the sources of the ops that it names below, with the flags of the ops.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src/anyaccel/ops"))
import in_tree  # noqa: E402

# File of tests/native, without _test.cpp -> the ops that it calls.
TESTS = {"optim": ("cpu_adam", "cpu_adagrad", "cpu_lion"), "aio": ("async_io",)}
SANITIZERS = {"address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "thread": ["-fsanitize=thread"]}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def build(test: str, sanitizer: str, folder: Path) -> Path:
    csrc = ROOT / "csrc"
    files = dict.fromkeys(file for op in TESTS[test] for file in in_tree.sources(op))
    sources = [ROOT / "tests/native" / f"{test}_test.cpp", *(csrc / file for file in files)]
    flags = [flag for flag in in_tree.flags() if flag not in ("-O3", "-DNDEBUG")]
    flags += ["-O1", "-g", "-fno-omit-frame-pointer", '-DANYACCEL_VARIANT="test"', f"-I{csrc}", *SANITIZERS[sanitizer]]
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    objects = [folder / f"{test}-{sanitizer}-{number}.o" for number in range(len(sources))]
    commands = [
        [*compiler, *flags, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    program = folder / f"{test}-{sanitizer}"
    link = [*compiler, *flags, *map(str, objects), *in_tree.LINK_FLAGS, "-ldl", "-o", str(program)]
    subprocess.run(link, check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "tests", nargs="*", default=list(TESTS), metavar="TEST", help=f"of {', '.join(TESTS)}; default: all"
    )
    parser.add_argument("--sanitizer", choices=SANITIZERS, action="append", help="default: all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for test in options.tests:
            for sanitizer in options.sanitizer or SANITIZERS:
                start = time.monotonic()
                try:
                    program = build(test, sanitizer, Path(folder))
                    subprocess.run([program], check=True, cwd=folder, env={**os.environ, **ENVIRONMENT}, timeout=600)
                except subprocess.CalledProcessError as error:
                    print(f"{test}, {sanitizer}: failed (exit code {error.returncode})")
                    return 1
                print(f"{test}, {sanitizer}: clean ({time.monotonic() - start:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
