# SPDX-License-Identifier: Apache-2.0
"""Writing to standard error without ever waiting for the one who reads it."""

from __future__ import annotations

import os
import select
import stat
import time

# What a pipe takes at once when it reports that it can be written to.
_CHUNK = select.PIPE_BUF


class Output:
    """A queue in front of a descriptor that other processes write to as well."""

    def __init__(self, descriptor: int = 2) -> None:
        self._pending = bytearray()
        self._broken = False
        self._given = descriptor
        self.descriptor = self._unblocked(descriptor)

    @staticmethod
    def _unblocked(descriptor: int) -> int:
        """The same pipe or terminal, opened anew: O_NONBLOCK on `descriptor` would change it for all."""
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            try:
                return os.open(f"/proc/self/fd/{descriptor}", flags)
            except OSError:
                return descriptor  # not ours to open; poll() before each write is nearly as good
        return descriptor

    @property
    def pending(self) -> int:
        """Bytes that the reader has not taken yet."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Queue `data` and pass on what the reader takes now."""
        if not self._broken:
            self._pending += data
            self.flush()

    def line(self, text: str) -> None:
        """`write` for a message of ours."""
        self.write(f"anyaccel: {text}\n".encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Pass on what the reader takes now."""
        while self._pending and self._ready(0):
            try:
                written = os.write(self.descriptor, self._pending[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                # The reader is gone. The workers go on; what they write goes nowhere.
                self._broken = True
                self._pending.clear()
                return
            del self._pending[:written]

    def close(self, timeout: float | None) -> None:
        """Pass on everything, waiting at most `timeout` seconds for the reader (None: no limit)."""
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
