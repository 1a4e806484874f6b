# SPDX-License-Identifier: Apache-2.0
"""Runs a program on a terminal of its own, and says what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import NamedTuple

_CODES = re.compile(r"\033\[[0-9;]*m")


class Seen(NamedTuple):
    """What a program has left on its terminal.

    Attributes:
        code: its exit code.
        raw: all that it wrote, with colours and lines that were written anew.
    """

    code: int
    raw: str

    @property
    def lines(self) -> list[str]:
        """What stands there in the end, without colours: a line that was written anew counts as it was written last."""
        lines = []
        for line in _CODES.sub("", self.raw).split("\n"):
            shown = ""
            for part in line.rstrip("\r").split("\r"):
                shown = part + shown[len(part) :]
            lines.append(shown.rstrip())
        return lines


def on_terminal(command: Sequence[str], *, columns: int = 80, timeout: float = 110, **variables: str) -> Seen:
    """Run a command on a terminal that understands colours, unless `variables` say otherwise."""
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", **variables}
    leader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    os.close(terminal)
    written = bytearray()
    deadline = time.monotonic() + timeout
    try:
        while select.select([leader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # all who had the terminal are gone
                break
            written += data
        code = process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        process.kill()
        process.wait(10)
        os.close(leader)
    return Seen(code, written.decode(errors="replace").replace("\r\n", "\n"))
