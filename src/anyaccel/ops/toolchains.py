# SPDX-License-Identifier: Apache-2.0
"""Finds the C++ compiler of this machine, and runs compilers in parallel with a deadline."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from anyaccel import env
from anyaccel.errors import OpBuildError

_CANDIDATES = ("c++", "g++", "clang++")
_INSTALL = "install one (Debian and Ubuntu: apt install g++; conda: conda install gxx) or set CXX"
_IDENTIFY_SECONDS = 30.0
_OUTPUT_LINES = 40
_OUTPUT_BYTES = 1 << 16

_OPENMP = "install OpenMP for this compiler (Debian and Ubuntu: apt install libomp-dev) or set CXX=g++"
# A pattern in the output of a compiler that failed -> what to do about it; GCC's words, then clang's.
_ADVICE = {
    r"Python\.h(: No such|' file not found)": "install Python's headers (Debian and Ubuntu: apt install python3-dev)",
    r"omp\.h(: No such|' file not found)": _OPENMP,
    r"cannot find -lomp|library not found for -lomp": _OPENMP,
    r"cannot find -l": "install that library's development package, or name its folder with -L in extra_ldflags()",
    r"execute .cc1plus": "install the C++ part of this compiler (Debian and Ubuntu: apt install g++)",
    r"option .-std=|invalid value .* in .-std=": "use a compiler that knows this standard (c++20: GCC 10, clang 12)",
    r"Killed signal": "the compiler was killed, mostly for lack of memory: set MAX_JOBS=1",
}


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: absolute path of the program, then the arguments that CXX adds.
        version: all that it prints for ``--version``.
    """

    command: tuple[str, ...]
    version: str

    def macros(self, flags: Sequence[str]) -> str:
        """The macros that it predefines with `flags`; with -march=native they identify the CPU."""
        command = [*self.command, *flags, "-E", "-dM", "-x", "c++", os.devnull]
        return run_all([command], jobs=1, seconds=_IDENTIFY_SECONDS)[0]


def find_compiler() -> Compiler:
    """The compiler that CXX names, else the first of c++, g++ and clang++ in PATH.

    Raises:
        OpBuildError: there is none, or it does not answer ``--version``.
    """
    try:
        chosen = shlex.split(env.CXX.get())
    except ValueError as error:
        raise OpBuildError(f"CXX={env.CXX.get()!r} cannot be read as a command: {error}") from None
    for words in [chosen] if chosen else [[name] for name in _CANDIDATES]:
        program = shutil.which(words[0])
        if program is not None:
            path = Path(program).absolute()
            return _identify((str(path), *words[1:]), path.stat().st_mtime_ns)
    if chosen:
        raise OpBuildError(f"CXX={env.CXX.get()!r}: no program {chosen[0]!r}, so there is no C++ compiler; {_INSTALL}")
    raise OpBuildError(f"there is no C++ compiler: PATH has none of {', '.join(_CANDIDATES)}; {_INSTALL}")


@functools.cache
def _identify(command: tuple[str, ...], _mtime_ns: int) -> Compiler:
    return Compiler(command, run_all([[*command, "--version"]], jobs=1, seconds=_IDENTIFY_SECONDS)[0])


def max_jobs() -> int:
    """How many compilers may run at once: MAX_JOBS, else the CPUs that this process may use."""
    return env.MAX_JOBS.get() or len(os.sched_getaffinity(0))


def run_all(
    commands: Sequence[Sequence[str]],
    *,
    jobs: int,
    seconds: float,
    since: float | None = None,
    folder: Path | None = None,
    announce: Callable[[str], object] = lambda text: None,
) -> list[str]:
    """Run all commands, up to `jobs` at once, and return what each printed (the last 64 KiB of it).

    The first failure, the deadline or an exception such as Ctrl-C kills every process that was started.

    Args:
        seconds: time for all of them together, counted from `since` (of time.monotonic(); default now).
        folder: for temporary files, and where the commands run; default the system's, and this process's.
        announce: called with each command as it starts.

    Raises:
        OpBuildError: a command cannot be started, failed, or did not end in time.
    """
    # LC_ALL: the version is a part of cache keys, and messages are matched for advice.
    variables = {**os.environ, "LC_ALL": "C", **({"TMPDIR": str(folder)} if folder else {})}
    deadline = (time.monotonic() if since is None else since) + seconds
    outputs = [""] * len(commands)
    waiting = list(enumerate(commands))[::-1]
    running: list[tuple[int, _Process]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, command = waiting.pop()
                announce(shlex.join(command))
                with _interrupted_later():  # the process must be in the list before Ctrl-C kills all
                    running.append((index, _Process(command, variables, folder)))
            for index, process in list(running):
                code = process.popen.poll()
                if code is None:
                    continue
                outputs[index] = process.output()
                if code != 0:
                    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
                    raise OpBuildError(_failure(f"the compiler failed ({how})", process.command, outputs[index]))
                running.remove((index, process))
                process.close()
            if running and time.monotonic() > deadline:
                process = running[0][1]
                what = f"the compiler did not end within {seconds:g} s and was killed"
                longer = f"if it needs more time, set {env.ANYACCEL_BUILD_TIMEOUT.name} to more seconds"
                raise OpBuildError(_failure(what, process.command, process.output(), longer))
            if running:
                time.sleep(0.005)
    finally:
        for _, process in running:
            process.kill()
        for _, process in running:
            process.close()
    return outputs


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """A Ctrl-C that comes inside raises at the end. A mask of signals would not do: torch's threads have their own."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(signal.SIGINT, came[0])


def _file_in_memory() -> int:
    """A descriptor of a file without a name; a temporary file where a sandbox forbids memfd_create."""
    try:
        return os.memfd_create("compiler output")
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


class _Process:
    """A running command whose output goes to a file in memory, so that it never blocks on a full pipe."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: Path | None) -> None:
        self.command = command
        self._output = _file_in_memory()
        try:
            # A process group of its own, as a compiler driver has children, and Ctrl-C must reach us first.
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=folder,
                process_group=0,
            )
        except OSError as error:
            os.close(self._output)
            raise OpBuildError(_failure(f"the compiler cannot be started ({error})", command, "", _INSTALL)) from None

    def output(self) -> str:
        """The last part of the output so far."""
        size = os.fstat(self._output).st_size
        start = max(0, size - _OUTPUT_BYTES)
        return os.pread(self._output, size - start, start).decode(errors="replace")

    def kill(self) -> None:
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for the end of the whole group, which writes to files that the caller is about to remove."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        os.close(self._output)
        if self.popen.returncode == 0:
            return
        # The driver's children are reaped by init, which does nothing in some containers: hence the short deadline.
        deadline = time.monotonic() + 1
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self.popen.pid, 0)
                time.sleep(0.005)


def _failure(what: str, command: Sequence[str], output: str, advice: str = "") -> str:
    lines = output.strip().splitlines()
    advice = advice or next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, output)), "")
    shown = [f"{what}: {shlex.join(command)}", *lines[-_OUTPUT_LINES:], advice]
    return "\n".join(line for line in shown if line)
