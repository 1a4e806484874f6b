# SPDX-License-Identifier: Apache-2.0
"""A Python that has imported torch already, and runs each program in a fork: importing takes 2 s each time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

# What `python` does with its arguments, in a fork. A line on standard input is one program; the answer is the number of
# its process, then its exit code.
_SERVER = """
import atexit, json, os, runpy, signal, sys, traceback
import {preload}
outside = list(sys.path)

def become(arguments, env, folder, files):
    for number, name in enumerate(files):
        file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    how, *rest = arguments
    first = os.path.dirname(os.path.abspath(how)) if how not in ("-c", "-m") else ""
    sys.path[:] = [first, *paths, *(path for path in outside if path not in paths)]
    if how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {{"__name__": "__main__", "__builtins__": __builtins__}})
    elif how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(how, run_name="__main__")

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            become(*json.loads(line))
            code = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 255)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class WarmPython:
    """Runs programs as `python ARGUMENTS...` does, each in a process that is forked from one with torch in it.

    Not for what depends on a fresh interpreter: options of Python itself, or which modules are imported.

    Args:
        env: environment of the programs.
        folder: where they run.
        python: the interpreter.
        preload: modules that it has imported.
    """

    def __init__(
        self, env: Mapping[str, str], folder: Path, python: str = sys.executable, preload: str = "torch, anyaccel"
    ) -> None:
        self._env, self._folder = dict(env), folder
        self._files = tempfile.TemporaryDirectory(prefix="warm-python-")
        self._numbers = itertools.count()
        self._server = subprocess.Popen(
            [python, "-c", _SERVER.format(preload=preload)],
            env=self._env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self, *arguments: str, timeout: float = 100, cwd: Path | None = None, input: str = "", **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, with `changes` of its environment; output is captured as text."""
        files = [Path(self._files.name) / f"{next(self._numbers)}-{name}" for name in ("in", "out", "err")]
        for file, text in zip(files, (input, "", ""), strict=True):
            file.write_text(text)
        env = self._env | changes
        request = [arguments, env, str(cwd or self._folder), [str(file) for file in files]]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        child = int(self._line(timeout))
        try:
            code = int(self._line(timeout))
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            self._line(10)
            raise AssertionError(f"{arguments} has not ended within {timeout:g} s: {files[2].read_text()}") from None
        return subprocess.CompletedProcess(arguments, code, files[1].read_text(), files[2].read_text())

    def _line(self, timeout: float) -> bytes:
        assert self._server.stdout is not None
        if not select.select([self._server.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._server.args, timeout)
        line = self._server.stdout.readline()
        assert line, f"the process that forks has ended with {self._server.wait(10)}"
        return line

    def close(self) -> None:
        for pipe in (self._server.stdin, self._server.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._server.wait(30)
        self._files.cleanup()

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checked(done: subprocess.CompletedProcess[str], codes: Sequence[int] = (0,)) -> str:
    """Standard output of a program that has to end with one of `codes`."""
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout
