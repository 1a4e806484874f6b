# SPDX-License-Identifier: Apache-2.0
"""Passes standard output and error of the workers on to the console and to log files.

Standard error always passes through here, to keep the last lines of a worker that fails; standard output only if an
option needs it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from anyaccel.errors import UsageError
from anyaccel.launch.output import DEBUG, LEVELS, WARNING, Output, OutputOptions

# Bytes that are queued for a slow reader of the console; beyond that the workers' writes block, as without us.
BACKLOG = 1 << 16
_TAIL_BYTES = 1 << 14
_TAIL_LINES = 20
# The most reads of each pipe after all workers have ended, as a process that was left behind may write for ever.
_LAST_READS = 64
# The most names that are tried for a log file, as another job may have started in the same second.
_MOST_NAMES = 1000
# A longer line is passed on in parts.
_LONGEST_LINE = 1 << 16


@dataclass
class _Stream:
    """One pipe from a worker; `line` holds a line that has not ended yet."""

    rank: int
    console: Output | None
    is_error: bool
    line: bytearray = field(default_factory=bytearray)


class Streams:
    """All pipes from the workers of this machine.

    Args:
        console: where lines of ours and the workers' standard error go.
    """

    def __init__(self, options: OutputOptions, console: Output) -> None:
        self._options = options
        self._error = console
        # Otherwise workers write to the launcher's own standard output.
        self._captures_all = options.rank_prefix or options.log_dir is not None
        self._output = Output(1, LEVELS[options.log_level]) if self._captures_all else None
        self._shown = options.log_dir is None or options.tee
        self._stamp = time.strftime("%Y%m%d%H%M%S")
        self._streams: dict[int, _Stream] = {}
        self._tails: dict[int, bytearray] = {}
        self._logs: dict[int, int] = {}
        self.every_log = True  # whether no log file has failed

    @property
    def logged(self) -> bool:
        """Whether there are log files that can be written."""
        return bool(self._logs)

    @property
    def outputs(self) -> list[Output]:
        """The console's descriptors that are written to."""
        return [self._error] if self._output is None else [self._error, self._output]

    def open(self, rank: int) -> tuple[int | None, int]:
        """Pipes for a worker: the write ends of its standard output (None: that of the launcher) and error.

        Raises:
            OSError: the system gives no more pipes, or the log file cannot be opened.
        """
        if self._options.log_dir is not None:
            self._logs[rank], name = _new_log(f"{self._options.log_dir}/{self._stamp}_rank{rank}")
            self._error.line(f"log of rank {rank}: {name}", DEBUG)
        self._tails[rank] = bytearray()
        error = self._pipe(_Stream(rank, self._error if self._shown else None, is_error=True))
        if self._output is None:
            return None, error
        return self._pipe(_Stream(rank, self._output if self._shown else None, is_error=False)), error

    def _pipe(self, stream: _Stream) -> int:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._streams[read_end] = stream
        return write_end

    def readable(self) -> list[int]:
        """Descriptors to wait for, except those of outputs whose queue is full."""
        return [
            pipe for pipe, stream in self._streams.items() if stream.console is None or stream.console.pending < BACKLOG
        ]

    def owns(self, descriptor: int) -> bool:
        """Whether it is the read end of one of these pipes."""
        return descriptor in self._streams

    def pump(self, pipe: int) -> bool:
        """Read a worker's output, pass it on and keep its tail; False if there was nothing to read."""
        stream = self._streams[pipe]
        try:
            data = os.read(pipe, BACKLOG)
        except BlockingIOError:
            return False
        if not data:
            self._end_line(stream)
            del self._streams[pipe]
            os.close(pipe)
            return False
        if stream.is_error:
            tail = self._tails[stream.rank]
            tail += data
            del tail[:-_TAIL_BYTES]
        self._pass_on(stream, self._whole_lines(stream, data) if self._captures_all else data)
        return True

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        if data and stream.rank in self._logs:
            self._log(stream.rank, data)
        if data and stream.console is not None:
            stream.console.write(_with_rank_prefix(stream.rank, data) if self._options.rank_prefix else data)

    def cut(self, output: Output) -> None:
        """Close the pipes that lead to `output`, which cannot be written any more.

        A worker's next write fails then, as it would if it wrote there itself. Pipes with a log file stay open.
        """
        for pipe, stream in list(self._streams.items()):
            if stream.console is output:
                stream.console = None
                if stream.rank not in self._logs:
                    del self._streams[pipe]
                    os.close(pipe)

    def drain(self, rank: int | None = None) -> None:
        """Pass on what is in the pipes of one worker, or of all."""
        for pipe, stream in list(self._streams.items()):
            if rank is None or stream.rank == rank:
                for _ in range(_LAST_READS):
                    if not self.pump(pipe):
                        break

    def finish(self) -> None:
        """Pass on everything that is left after all workers have ended."""
        self.drain()
        for stream in self._streams.values():
            self._end_line(stream)
        for log in self._logs.values():
            os.close(log)
        self._logs.clear()

    def tail(self, rank: int) -> tuple[str, ...]:
        """Last lines of a worker on standard error."""
        lines = self._tails[rank].decode(errors="replace").splitlines()
        return tuple([line[:500] for line in lines if line.strip()][-_TAIL_LINES:])

    def _whole_lines(self, stream: _Stream, data: bytes) -> bytes:
        """The complete lines so far, so that lines of different streams are not mixed."""
        stream.line += data
        end = max(stream.line.rfind(b"\n"), stream.line.rfind(b"\r")) + 1
        if not end and len(stream.line) >= _LONGEST_LINE:
            end = len(stream.line)
        whole = bytes(stream.line[:end])
        del stream.line[:end]
        return whole

    def _end_line(self, stream: _Stream) -> None:
        rest = bytes(stream.line)
        stream.line.clear()
        self._pass_on(stream, rest + b"\n" if rest else b"")

    def _log(self, rank: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._logs[rank], data) :]
        except OSError as error:
            os.close(self._logs.pop(rank))
            self.every_log = False
            for stream in self._streams.values():
                if stream.rank == rank and stream.console is None:
                    stream.console = self._error if stream.is_error else self._output
            shown = "what it writes from here on is shown here"
            if self._output is not None and self._output.problem:
                shown = "what it writes to standard output is lost, which cannot be written either"
            self._error.line(
                f"warning: the log of rank {rank} in {self._options.log_dir} cannot be written: {error.strerror}; "
                f"the job goes on, and {shown}",
                WARNING,
            )


def _new_log(stem: str) -> tuple[int, str]:
    """Create a log file; returns its descriptor and its path.

    An existing file or link is never opened, as its name can be guessed and others may write to the folder.

    Raises:
        OSError: it cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
    number = 0
    while True:
        name = f"{stem}.{number}.log" if number else f"{stem}.log"
        try:
            return os.open(name, flags, 0o666), name
        except FileExistsError:
            number += 1
            if number > _MOST_NAMES:
                raise


def _with_rank_prefix(rank: int, data: bytes) -> bytes:
    """Complete lines with the rank before each; a carriage return, as in a progress bar, ends a line too."""
    prefix = f"[rank{rank}] ".encode()
    return b"".join(prefix + line if line.strip(b"\r\n") else line for line in data.splitlines(keepends=True))


def prepare_log_dir(options: OutputOptions) -> None:
    """Make the folder of the log files.

    Raises:
        UsageError: it cannot be made, or not be written to.
    """
    folder = options.log_dir
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--enable_each_rank_log {folder!r} cannot be made: {error.strerror}; give another folder"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--enable_each_rank_log {folder!r} cannot be written to; give another folder")
