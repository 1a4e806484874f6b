# SPDX-License-Identifier: Apache-2.0
"""Makes standard streams that are closed or full safe: output goes to the right stream, or the command fails."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TextIO


class _IgnoresWriteErrors(io.FileIO):
    """A standard error that ignores write errors: they could be reported nowhere, and the command can go on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _open_descriptors() -> None:
    """Open /dev/null, which children inherit, at each standard descriptor that is closed.

    Otherwise the next file or socket would be opened at that number, and would get what is meant for the stream.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, mode)
            os.dup2(opened, descriptor)
            if opened == descriptor:  # it was the lowest free number, so dup2 did nothing
                os.set_inheritable(descriptor, True)
            else:
                os.close(opened)


def _without_write_errors(stream: TextIO | None) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_IgnoresWriteErrors(2, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        write_through=True,
        line_buffering=True,
    )


def _line_buffered_output(stream: TextIO) -> TextIO:
    """Standard output that is buffered by lines, for a Python that was started with -u.

    Without a buffer, output that fails to be written would be lost, and could not be reported at the end.
    """
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


@contextmanager
def standard_streams() -> Iterator[None]:
    """Replace each standard stream that is closed: by an empty input, an output that fails on write, a silent error.

    A shell closes them with `<&-`, `>&-` and `2>&-`. Python then has None in their place, and print(file=None)
    would write error messages to standard output. A stream that is open is kept, but errors in writing to standard
    error are ignored.
    """
    _open_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a stream, no path
    if sys.stdout is None:
        # The descriptor discards what children print, but the output of the command itself must not vanish silently.
        unwritable = os.open(os.devnull, os.O_RDONLY)
        sys.stdout = open(unwritable, "w", encoding="utf-8")  # noqa: SIM115
    before = sys.stderr
    own = before is None or (before is sys.__stderr__ and isinstance(before, io.TextIOWrapper))
    if own:
        sys.stderr = _without_write_errors(before)
    output = sys.stdout
    unbuffered = output is sys.__stdout__ and isinstance(getattr(output, "buffer", None), io.RawIOBase)
    if unbuffered:
        sys.stdout = _line_buffered_output(output)
    try:
        yield
    finally:
        if unbuffered:
            sys.stdout = output
        if own and before is not None:
            sys.stderr = before


def flush_output(code: int) -> int:
    """Flush standard output. Returns `code`, or where that fails, prints why and returns a code that is not 0."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return 141
    except OSError as error:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror or error
        drop_output()
        print(f"anyaccel: error: standard output cannot be written ({reason})", file=sys.stderr)
        return code or 1
    return code


def output_fails() -> bool:
    """Whether the buffered output cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def drop_output() -> None:
    """Discard what is still buffered, since Python would report it again when it flushes at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    sys.stdout.flush()
