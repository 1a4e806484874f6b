#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks over what has changed, in at most 90 seconds: `make check`, for the way between two runs of `make test`.

    python tools/check.py                  what is not committed, or the last commit where everything is
    python tools/check.py --base main      what differs from a commit or branch
    python tools/check.py --list           the tests that it would run, nearest first

The changed files are linted, and the unit tests that they touch are run: changed test files first, then those that
import a changed module, then those that import a module which imports one, and so on until the time is up. What was
left out for want of time is named.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# What tests of a folder of C++ import.
NATIVE = {
    "llm": ("anyaccel._llm",),
    "comm": ("anyaccel._native",),
    "ccl": ("anyaccel._native",),
    "common": ("anyaccel._native", "anyaccel._llm"),
    "simd": ("anyaccel._native", "anyaccel._llm", "anyaccel.ops.adam"),
    "bindings": ("anyaccel._native", "anyaccel._llm"),
    "optim": ("anyaccel.ops.adam", "anyaccel.ops.lion", "anyaccel.ops.adagrad"),
    "aio": ("anyaccel.ops.aio",),
}


def changed_files(base: str | None) -> list[Path]:
    """Files that differ from `base`, or from the last commit, or that the last commit changed; deleted ones too."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise SystemExit(f"check: git {' '.join(arguments)}: {why[0]}")
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]

    names_of = ("diff", "--name-only", "--no-renames", "-z")
    names = git(*names_of, base or "HEAD", "--") + git("ls-files", "--others", "--exclude-standard", "-z")
    if not names and base is None:
        names = git("diff-tree", "--root", "--no-commit-id", "-r", *names_of[1:], "HEAD")
    return [ROOT / name for name in dict.fromkeys(names)]


def module_name(file: Path) -> str:
    """What `file` is imported as: by tests, which have the folder tests/helpers on their path, and by the package."""
    for top in (ROOT / "src", ROOT / "tests" / "helpers", ROOT / "tests", ROOT / "tools"):
        if file.is_relative_to(top):
            parts = file.relative_to(top).with_suffix("").parts
            if top.name != "src":
                parts = parts[-1:]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return ""


def imports(file: Path) -> set[str]:
    """Modules that a file imports anywhere in it, `a.b` for `from a import b` too: b may be a module.

    Of a file that is no Python none: ruff says what is wrong with it.
    """
    own = module_name(file).split(".")
    package = own if file.name == "__init__.py" else own[:-1]
    found = set()
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def touched_tests(changed: Iterable[Path]) -> list[list[Path]]:
    """Files of unit tests by how far they are from what has changed, nearest first."""
    files = [file for top in ("src", "tests", "tools") for file in sorted((ROOT / top).rglob("*.py"))]
    users: dict[str, set[Path]] = {}
    for file in files:
        for module in imports(file):
            users.setdefault(module, set()).add(file)
    near: set[Path] = set()
    names: set[str] = set()
    for file in changed:
        if file.suffix == ".py" and file.exists():
            near.add(file)
        elif file.suffix == ".py":  # deleted: who still imports it?
            names.add(module_name(file))
        elif file.is_relative_to(ROOT / "csrc"):
            names |= set(NATIVE.get(file.relative_to(ROOT / "csrc").parts[0], ()))
        elif file.suffix not in (".cpp", ".h"):  # data, pages, the Makefile: what names the file reads it
            named = {each for each in files if each.is_relative_to(ROOT / "tests") and mentions(each, file.name)}
            near |= named
    near |= {user for name in names for user in users.get(name, ())}
    seen: set[Path] = set()
    distances = []
    while near:
        seen |= near
        tests = [each for each in sorted(near) if each.name.startswith("test_")]
        distances.append([each for each in tests if each.is_relative_to(ROOT / "tests" / "unit")])
        beside = {file.parent for file in near if file.name == "conftest.py"}  # pytest gives it to all below
        near = {user for file in near for user in users.get(module_name(file), ())}
        near |= {each for each in files if each.name.startswith("test_") and beside & set(each.parents)}
        near -= seen
    return [tests for tests in distances if tests]


def mentions(file: Path, name: str) -> bool:
    try:
        return os.fsencode(name) in file.read_bytes()
    except OSError:
        return False


def lint_commands(changed: Sequence[Path]) -> list[list[str]]:
    python = [str(file) for file in changed if file.suffix == ".py" and file.exists()]
    cpp = [str(file) for file in changed if file.suffix in (".cpp", ".h") and file.exists()]
    commands = []
    if python:
        commands += [[str(BIN / "ruff"), "check", *python], [str(BIN / "ruff"), "format", "--check", *python]]
    if any(file.is_relative_to(ROOT / "src") and file.suffix == ".py" for file in changed):
        commands.append([str(BIN / "mypy")])
    if cpp:
        commands.append([str(BIN / "clang-format"), "--dry-run", "--Werror", *cpp])
    return commands


class Commands:
    """What is under way, each command in a session of its own, so that nothing of it is left when it is ended."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._running: list[subprocess.Popen[str]] = []

    def run(self, command: Sequence[str]) -> tuple[int | None, str]:
        """Exit code and output; None where the time is up, and the command was ended."""
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self._running.append(process)
        try:
            output, _ = process.communicate(timeout=max(self.deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            end(process)
            return None, process.communicate()[0]
        return process.returncode, output

    def end_all(self) -> None:
        for process in self._running:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ask the processes of a session to end, and kill what has not in five seconds."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def check(
    changed: Sequence[Path], distances: Sequence[Sequence[Path]], commands: Commands, least: float
) -> tuple[int, list[Path]]:
    """How many commands failed, and the files of tests that there was no time for.

    Args:
        least: seconds that must be left for tests that are not the nearest: with less, hardly any would end.
    """
    failed, late = 0, list[Path]()
    with ThreadPoolExecutor() as pool:
        lints = [(command, pool.submit(commands.run, command)) for command in lint_commands(changed)]
        try:
            for tests in distances:
                if commands.deadline - time.monotonic() < least and tests is not distances[0]:
                    late += tests
                    continue
                names = [str(test.relative_to(ROOT)) for test in tests]
                parallel = ["-n", "auto", "--dist", "loadfile"] if len(names) > 2 else []
                # The first failure ends it: what comes after might use up the time, and nobody would read of it.
                code, output = commands.run(
                    [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", *parallel, *names]
                )
                print(output, end="", flush=True)
                if code is None:
                    late += tests
                elif code not in (0, 5):  # 5: all tests of these files are slow ones
                    failed += 1
        except BaseException:
            commands.end_all()
            raise
        for command, future in lints:
            code, output = future.result()
            name = Path(command[0]).name
            if code is None:
                print(f"check: {name} was not done in time; `make lint` runs it")
            elif code:
                failed += 1
                print(output, end="")
                print(f"check: {name} failed")
    return failed, late


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="commit or branch to compare with (default: the last commit)")
    parser.add_argument("--seconds", type=float, default=90, help="time for all of it (default: 90)")
    parser.add_argument("--list", action="store_true", help="name the tests and end")
    options = parser.parse_args(arguments)
    commands = Commands(time.monotonic() + options.seconds)
    changed = changed_files(options.base)
    distances = touched_tests(changed)
    if options.list:
        for distance, tests in enumerate(distances):
            for test in tests:
                print(distance, test.relative_to(ROOT))
        return 0
    print(f"check: {len(changed)} changed files, {sum(map(len, distances))} files of unit tests", flush=True)
    try:
        failed, late = check(changed, distances, commands, 0.3 * options.seconds)
    except KeyboardInterrupt:
        commands.end_all()
        print("check: interrupted")
        return 130
    if any(file.suffix in (".cpp", ".h") for file in changed):
        print("check: C++ has changed: `make test-native` builds and runs its tests")
    if late:
        print(f"check: no time for {' '.join(str(test.relative_to(ROOT)) for test in late)}")
    print(f"check: {'failed' if failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--list | head` is no error
    os.chdir(ROOT)
    sys.exit(main())
