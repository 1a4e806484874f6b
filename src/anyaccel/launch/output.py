# SPDX-License-Identifier: Apache-2.0
"""Writes to standard output and error without ever blocking on a slow reader."""

from __future__ import annotations

import os
import select
import stat
import time
from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.terminal import marked

# A pipe that poll() reports as writable takes this many bytes without blocking.
_CHUNK = select.PIPE_BUF

_NAMES = {1: "standard output", 2: "standard error"}

# Levels of the launcher's own lines, as in `logging`.
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
DEBUG, INFO, WARNING, ERROR = LEVELS.values()


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where output goes.

    Attributes:
        log_dir: folder that gets one log file a rank, standard output and error together; None for none. The
            console then shows the launcher's own lines only.
        tee: with `log_dir`, show the workers' output on the console as well.
        rank_prefix: begin each line of a worker with ``[rankN] ``.
        log_level: the launcher's own lines below this level are left out: a key of LEVELS.
    """

    log_dir: str | None = None
    tee: bool = False
    rank_prefix: bool = False
    log_level: str = "info"

    def check_output(self) -> None:
        """Raise UsageError where the options contradict each other."""
        if self.log_dir is not None and not self.log_dir:
            raise UsageError("--enable_each_rank_log is empty; give a folder or leave it out")
        if self.tee and self.log_dir is None:
            raise UsageError("--tee shows what goes to log files, and there are none; add --enable_each_rank_log DIR")
        if self.log_level not in LEVELS:
            raise UsageError(f"--log_level is {self.log_level!r}, it must be one of {', '.join(LEVELS)}")


def cannot_write(output: Output, *, logged: bool, every_log: bool = True) -> str:
    """The line about an output that failed.

    Args:
        logged: whether there are log files that can be written.
        every_log: whether no log file has failed.
    """
    if logged:
        which = "the log files" if every_log else "those log files that can be written"
        return f"{output.loss}; the job goes on, and its output is in {which}"
    return f"{output.loss}; output of the workers is lost, and what they write there from now on fails"


class Output:
    """A queue in front of a descriptor that other processes write to as well.

    Args:
        level: lines below it are left out.
        name: the beginning of each line.

    Attributes:
        problem: why writing has failed for good: the disk is full, the reader is gone. "" if it has not.
        lost: whether output of a worker was dropped for that reason.
    """

    def __init__(self, descriptor: int = 2, level: int = INFO, name: str = "anyaccel") -> None:
        self._pending = bytearray()
        self._has_data = False  # whether output of workers is pending, not only lines of ours
        self._closed = False
        self.problem = ""
        self.lost = False
        self._given = descriptor
        self._level = level
        self._name = name
        self.descriptor = self._unblocked(descriptor)

    def _unblocked(self, descriptor: int) -> int:
        """The pipe or terminal, reopened, as O_NONBLOCK on `descriptor` would affect all processes that share it."""
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            self._closed = True  # the process that started us has closed it on purpose, so nothing counts as lost
            return descriptor
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            try:
                return os.open(f"/proc/self/fd/{descriptor}", flags)
            except OSError:
                return descriptor  # we may not open it; poll() before each write is nearly as good
        return descriptor

    @property
    def is_standard_error(self) -> bool:
        """Whether it writes to descriptor 2."""
        return self._given == 2

    @property
    def loss(self) -> str:
        """What was lost and why, as "standard output: No space left on device"; "" for nothing."""
        return f"{_NAMES.get(self._given, 'the connection')}: {self.problem}" if self.lost else ""

    def become(self, name: str, level: int) -> None:
        """Begin lines with another name, and leave out those below another level."""
        self._name, self._level = name, level

    @property
    def pending(self) -> int:
        """The number of queued bytes."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Queue output of a worker, and write what can be written now."""
        if self.problem:
            self.lost = self.lost or bool(data)
        else:
            self._has_data = True
            self._queue(data)

    def line(self, text: str, level: int = INFO) -> None:
        """Queue a line of the launcher's own, which is not counted as lost output."""
        if level >= self._level and not self.problem:
            self._queue(f"{self._name}: {marked(text, self._given)}\n".encode(errors="backslashreplace"))

    def _queue(self, data: bytes) -> None:
        if not self._closed:
            self._pending += data
            self.flush()

    def flush(self) -> None:
        """Write what can be written without blocking."""
        while self._pending and self._ready(0):
            try:
                written = os.write(self.descriptor, self._pending[:_CHUNK])
            except BlockingIOError:
                return
            except OSError as error:
                # The caller closes the workers' pipes then, so that their next write fails as it would without us.
                self.problem = str(error.strerror)
                self.lost = self._has_data
                self._pending.clear()
                return
            del self._pending[:written]
        self._has_data = self._has_data and bool(self._pending)

    def close(self, timeout: float | None) -> None:
        """Write everything, waiting at most `timeout` seconds for the reader (None: no limit)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self._pending:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._ready(left)
                self.flush()
        finally:
            if self.descriptor != self._given:
                os.close(self.descriptor)

    def _ready(self, timeout: float | None) -> bool:
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        return bool(poller.poll(None if timeout is None else timeout * 1000))
