# SPDX-License-Identifier: Apache-2.0
"""Messages between the launcher and an agent, through standard input and error of ssh, or through TCP.

The launcher sends lines of JSON, then one byte for each signal (or 0 as a heartbeat, or another of `local.protocol`).
The agent sends frames, in the middle of its workers' standard error. A frame begins with NUL and the secret of this
job, so that no worker can write one by accident:

    NUL anyaccel: SECRET : KIND : BASE64 OF JSON newline
"""

from __future__ import annotations

import binascii
import json
import os
import select
import time
from collections.abc import Callable

from anyaccel.errors import AnyAccelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Seconds between two heartbeats of the launcher, and seconds without one after which an agent ends its workers.
HEARTBEAT = 1.0
HEARTBEAT_TIMEOUT = 7.0

# Kinds of frames: the agent has called back, is ready, cannot do its part, has a worker that failed, has finished.
HELLO, READY, REFUSED, FAILED, FINISHED = "hello", "ready", "refused", "failed", "finished"

# No frame is longer, as the texts in it are cut before.
_LONGEST = 1 << 20


class ConnectionLostError(AnyAccelError):
    """The other end cannot be reached, or does not answer."""


class HungUpError(ConnectionLostError):
    """The other end has closed the connection: it has ended, or wants this one to end."""


def encode_line(data: Any) -> bytes:
    """A line of JSON. Bytes of arguments and variables that are not UTF-8 travel as surrogates."""
    return json.dumps(data).encode() + b"\n"


def read_line(descriptor: int, timeout: float) -> Any:
    """Read a line that `encode_line` made, and no byte behind it. Spaces before it are heartbeats.

    Args:
        timeout: seconds in which the next byte must come.

    Raises:
        ConnectionLostError: end of file or no byte in time.
    """
    deadline = time.monotonic() + timeout
    line = bytearray()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise ConnectionLostError(f"nothing came from the launcher within {timeout:g} s")
        try:
            byte = os.read(descriptor, 1)
        except BlockingIOError:
            continue
        except OSError:
            byte = b""  # the connection was reset
        deadline = time.monotonic() + timeout
        if not byte:
            raise HungUpError("the launcher is gone")
        line += byte
    return json.loads(line)


def encode_frame(secret: str, kind: str, data: Any) -> bytes:
    """One frame."""
    text = binascii.b2a_base64(json.dumps(data).encode(), newline=False).decode()
    return f"\0anyaccel:{secret}:{kind}:{text}\n".encode()


class FrameReader:
    """Separates frames from the text around them in a stream.

    Args:
        on_frame: called with kind and data of each frame; may be replaced later.
        on_text: called with the text between frames; may be replaced later.
    """

    def __init__(self, secret: str, on_frame: Callable[[str, Any], None], on_text: Callable[[bytes], None]) -> None:
        self._start = f"\0anyaccel:{secret}:".encode()
        self.on_frame = on_frame
        self.on_text = on_text
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Process more of the stream."""
        self._buffer += data
        while True:
            at = self._buffer.find(self._start)
            if at < 0:
                self._emit_text(len(self._buffer) - self._possible_start())
                return
            self._emit_text(at)
            end = self._buffer.find(b"\n")
            if end < 0 and len(self._buffer) <= _LONGEST:
                return
            if end < 0 or not self._emit_frame(bytes(self._buffer[len(self._start) : end])):
                self._emit_text(1)  # not a valid frame, so its NUL is text
                continue
            del self._buffer[: end + 1]

    def close(self) -> None:
        """End the stream: bytes that could have begun a frame are text."""
        self._emit_text(len(self._buffer))

    def _possible_start(self) -> int:
        """The number of bytes at the end that may be the beginning of a frame."""
        at = self._buffer.rfind(b"\0", max(0, len(self._buffer) - len(self._start)))
        return len(self._buffer) - at if at >= 0 and self._start.startswith(self._buffer[at:]) else 0

    def _emit_text(self, size: int) -> None:
        if size:
            text = bytes(self._buffer[:size])
            del self._buffer[:size]
            self.on_text(text)

    def _emit_frame(self, body: bytes) -> bool:
        kind, _, text = body.partition(b":")
        try:
            data = json.loads(binascii.a2b_base64(text, strict_mode=True))
        except ValueError:  # a message of ssh itself has come in between
            return False
        self.on_frame(kind.decode(errors="replace"), data)
        return True
