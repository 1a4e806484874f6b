# SPDX-License-Identifier: Apache-2.0
"""Signals as bytes on a descriptor, for an event loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyaccel.launch.local.worker import PASSED_ON, STOP_SIGNALS


@contextmanager
def stop_signals() -> Iterator[int]:
    """Yields a descriptor that receives the number of each signal: those that end the launcher or are for the workers,
    and SIGCHLD.

    Enter it before other processes are started: a signal that comes earlier ends this process alone.
    """
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    old: dict[signal.Signals, Any] = {}
    old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        for number in (*STOP_SIGNALS, *PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
                old[number] = signal.signal(number, lambda _number, _frame: None)
        yield read_end
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(old_wakeup)
        os.close(read_end)
        os.close(write_end)


def ignore_passed_on() -> None:
    """Ignore what is for the workers alone, for a child that is about to become another program, such as ssh."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def without_stopping() -> Iterator[None]:
    """Ignores SIGTSTP, as workers on other hosts would not stop, and would miss our heartbeats.

    Start no process inside, which would ignore it for good.
    """
    old = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL if old is None else old)
