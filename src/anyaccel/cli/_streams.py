# SPDX-License-Identifier: Apache-2.0
"""Standard streams that are closed or full: a command still says what it has to say, in the right place, or fails."""

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


class _Forgiving(io.FileIO):
    """Standard error whose write errors are ignored: there is nowhere left to report them, and the command goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _open_descriptors() -> None:
    """Give each standard descriptor that is closed a /dev/null, which children inherit.

    Else the next file or socket that is opened would take the number, and get what is meant for the stream.
    """
    for descriptor, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, mode)
            os.dup2(opened, descriptor)
            if opened == descriptor:  # the lowest free number was the right one, so dup2 did nothing
                os.set_inheritable(descriptor, True)
            else:
                os.close(opened)


def _forgiving(stream: TextIO | None) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(2, "w", closefd=False)),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        write_through=True,
        line_buffering=True,
    )


def _buffered(stream: TextIO) -> TextIO:
    """Standard output buffered by lines, for a Python that was started with -u.

    Without a buffer, output that could not be written would be gone and could not be reported at the end.
    """
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


@contextmanager
def standard_streams() -> Iterator[None]:
    """Inside, there are three standard streams: an empty input, an output that fails when written to, a silent error.

    Callers close them (`<&-`, `>&-`, `2>&-`); Python leaves None in such a place then, and print(file=None)
    writes errors to standard output. What is open stays as it is, but that errors in writing to standard error are
    passed over.
    """
    _open_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - a stream, no path
    if sys.stdout is None:
        # The descriptor swallows what children print; what this command is asked for must not be lost in silence.
        unwritable = os.open(os.devnull, os.O_RDONLY)
        sys.stdout = open(unwritable, "w", encoding="utf-8")  # noqa: SIM115
    before = sys.stderr
    own = before is None or (before is sys.__stderr__ and isinstance(before, io.TextIOWrapper))
    if own:
        sys.stderr = _forgiving(before)
    output = sys.stdout
    unbuffered = output is sys.__stdout__ and isinstance(getattr(output, "buffer", None), io.RawIOBase)
    if unbuffered:
        sys.stdout = _buffered(output)
    try:
        yield
    finally:
        if unbuffered:
            sys.stdout = output
        if own and before is not None:
            sys.stderr = before


def written(code: int) -> int:
    """`code`, when all that the command printed has been written; else say that it could not be, and return 1."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return 141
    except OSError as error:
        said = "it is closed" if error.errno == errno.EBADF else error.strerror or error
        drop_output()
        print(f"anyaccel: error: standard output cannot be written ({said})", file=sys.stderr)
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
    """Forget what waits to be printed: Python would complain of it again while flushing at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    sys.stdout.flush()
