# SPDX-License-Identifier: Apache-2.0
"""Messages between a command and its ranks over a socket pair: one JSON object per line.

A rank that loads sends single bytes between them, as `_native.Heartbeat` does; they are no part of JSON.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from typing import Any

from anyaccel.errors import CommTimeoutError

_CHUNK = 1 << 16
# Bytes of csrc/common/heartbeat.h. They may come anywhere, also within a message.
_WORKED = b"\1"
_BEATS = b"\0" + _WORKED


class Channel:
    """One end of a socket pair.

    Args:
        timeout: seconds in which a peer must read a message.

    Attributes:
        heard: whether the peer has sent anything since this was set to False.
        worked: the same of its having worked, which its heartbeat tells.
    """

    def __init__(self, descriptor: int, timeout: float) -> None:
        self.descriptor = descriptor
        self._timeout = timeout
        self._messages: deque[dict[str, Any]] = deque()
        self._rest = b""
        self.heard = self.worked = False
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)

    def close(self) -> None:
        """Close this end; the peer reads end of file when every copy of it is closed."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            BrokenPipeError, ConnectionResetError: the peer is gone.
            CommTimeoutError: it does not read.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + self._timeout
        while data:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:
                _wait(self.descriptor, select.POLLOUT, deadline, "does not read what it is told")

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message.

        Args:
            timeout: seconds to wait for it; None: no limit.

        Raises:
            EOFError: the peer is gone.
            CommTimeoutError: no message has come in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._messages:
            if not self.pump():
                _wait(self.descriptor, select.POLLIN, deadline, "says nothing")
        return self._messages.popleft()

    def next(self) -> dict[str, Any] | None:
        """The next message that has been read already, or None."""
        return self._messages.popleft() if self._messages else None

    def pump(self) -> bool:
        """Read available data; False if there was none.

        Raises:
            EOFError: the peer is gone.
        """
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        self.heard = True
        self.worked |= _WORKED in data
        *whole, self._rest = (self._rest + data.translate(None, _BEATS)).split(b"\n")
        self._messages.extend(json.loads(line) for line in whole)
        return True


def _wait(descriptor: int, events: int, deadline: float | None, problem: str) -> None:
    poller = select.poll()
    poller.register(descriptor, events)
    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poller.poll(left):
        raise CommTimeoutError(f"the other end of a rank's socket {problem}; is a process stopped?")
