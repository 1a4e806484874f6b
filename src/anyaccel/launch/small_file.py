# SPDX-License-Identifier: Apache-2.0
"""Reads a hostfile or environment file, which may also be a pipe, with bounds on size and time."""

from __future__ import annotations

import os
import select
import stat
import time

from anyaccel.errors import UsageError

# Bytes; an environment, and a hostfile of thousands of hosts, are far smaller.
_LARGEST = 1 << 22
# Seconds in which a pipe, such as that of `<(command)`, must come to its end.
_PIPE_S = 30.0
# Seconds in which a writer must open a named pipe.
_WRITER_S = 1.0


def read_small_file(path: str, what: str, *, encoding: str) -> str:
    """The text of a file or pipe; bytes that are not of its encoding become surrogates.

    Args:
        what: what messages call it.

    Raises:
        FileNotFoundError, NotADirectoryError: it is not there.
        UsageError: it cannot be read, is too large, or is a pipe that does not come to its end.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would block until a writer opens it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UsageError(f"{what} {path!r} cannot be read: {error.strerror}") from None
    try:
        return _read(descriptor).decode(encoding, errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise UsageError(f"{what} {path!r} cannot be read: {error.strerror or error}") from None
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    """Read to the end.

    Raises:
        OSError: it cannot be read, is too large, or does not come to its end in time.
    """
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    data = bytearray()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + _PIPE_S
    waited = False  # whether a pipe was given time for its writer
    while len(data) <= _LARGEST:
        try:
            piece = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise OSError(f"it did not finish within {_PIPE_S:g} s; give a file") from None
            continue
        data += piece
        if piece:
            continue
        if data or not is_pipe:
            return bytes(data)
        if waited or not poller.poll(_WRITER_S * 1000):
            raise OSError("it is a pipe that nobody writes to; give a file")
        waited = True
    raise OSError(f"it has more than {_LARGEST >> 20} MiB; give a text file")
