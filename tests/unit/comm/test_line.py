# SPDX-License-Identifier: Apache-2.0
"""The threads of a group: what is asked for is done and they end, also where Ctrl-C comes meanwhile."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from anyaccel.comm.process_group import _stop
from anyaccel.comm.work import Line
from waiting import wait_for


class Group:
    """What `_stop` is given, and what it has called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def leave(self) -> None:
        self.called.append("leave")

    def close(self) -> None:
        self.called.append("close")


def test_an_interrupt_while_a_group_ends_leaves_no_thread() -> None:
    line, group = Line("a-line"), Group()
    going, release = threading.Event(), threading.Event()

    def run() -> None:
        going.set()
        release.wait()

    work = line.submit(run, "done")
    thread = line._thread
    assert thread is not None
    assert going.wait(60)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        _stop(group, line, group)  # type: ignore[arg-type]
    assert group.called == ["leave", "close"]
    release.set()
    assert work.result() == "done"
    wait_for(lambda: thread not in threading.enumerate(), "the thread ends")
    line.close()  # a second time is no mistake
