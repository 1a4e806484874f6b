# SPDX-License-Identifier: Apache-2.0
"""The threads of a group: what is asked for is done and they end, also where Ctrl-C comes meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anyaccel.comm.executor import Executor
from anyaccel.comm.process_group import _stop
from anyaccel.errors import CommTimeoutError
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
    executor, group = Executor("an-executor"), Group()
    going, release = threading.Event(), threading.Event()

    def run() -> None:
        going.set()
        release.wait()

    work = executor.submit(run, "done")
    thread = executor._thread
    assert thread is not None
    assert going.wait(60)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        _stop(group, executor, group)  # type: ignore[arg-type]
    assert group.called == ["leave", "close"]
    release.set()
    assert work.result() == "done"
    wait_for(lambda: thread not in threading.enumerate(), "the thread ends")
    executor.close()  # a second time is no mistake


class Asked:
    """Operations of an executor, which write down that they were done."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.done = executor, list[str]()
        self.may_begin = threading.Event()

    def __call__(self, name: str) -> Any:
        def run() -> None:
            assert self.may_begin.wait(60)
            self.done.append(name)

        return self.executor.submit(run, name)


@pytest.fixture
def asked() -> Iterator[Asked]:
    executor = Executor("an-executor")
    yield Asked(executor)
    assert executor.close(60)


def test_what_callbacks_ask_for_goes_before_what_is_behind(asked: Asked) -> None:
    def callback(_: Any) -> None:
        asked("first of callback").wait()
        inner = asked("second of callback")
        inner.get_future().then(lambda _: asked("of its callback").wait())
        asked("third of callback")

    asked("a").get_future().then(callback)
    asked("b")
    last = asked("c")
    asked.may_begin.set()
    last.wait()
    of_callback = ["first of callback", "second of callback", "of its callback", "third of callback"]
    assert asked.done == ["a", *of_callback, "b", "c"]


@pytest.mark.parametrize(
    "wait", [lambda work: work.wait(), lambda work: work.get_future().wait()], ids=["work", "future"]
)
def test_a_callback_that_waits_for_what_is_behind_goes_on_right_after_that(
    asked: Asked, wait: Callable[[Any], Any]
) -> None:
    behind: list[Any] = []

    def callback(_: Any) -> None:
        asked("before the wait")
        wait(behind[1])
        asked("after the wait").wait()
        wait(behind[2])
        asked("at the end")

    asked("a").get_future().then(callback)
    for name in ("b", "c", "d", "e"):
        behind.append(asked(name))
    behind[1].get_future().then(lambda _: asked("of c").wait())
    asked.may_begin.set()
    behind[-1].wait()
    assert asked.done == ["a", "before the wait", "b", "c", "of c", "after the wait", "d", "at the end", "e"]
    assert asked.executor.waiting == 0


def test_a_callback_that_never_ends_is_an_error_of_what_is_behind() -> None:
    given_up: list[bool] = []
    executor = Executor("an-executor", give_up=lambda: given_up.append(True), timeout=lambda: 0.1)
    asked, go_on, ended = Asked(executor), threading.Event(), threading.Event()
    late: list[Any] = []

    def callback(_: Any) -> None:
        assert go_on.wait(60)
        late.append(asked("late"))
        ended.set()

    asked("a").get_future().then(callback)
    behind = asked("b")
    asked.may_begin.set()
    with pytest.raises(CommTimeoutError, match=r"callback.*timeout of 0\.1 s"):
        behind.wait()
    assert given_up == [True]
    assert asked.done == ["a"]  # nothing in an order that may be another one on other ranks
    go_on.set()
    assert ended.wait(60)
    for work in (late[0], asked("c")):
        with pytest.raises(CommTimeoutError):
            work.wait()
    assert executor.close(60)
    wait_for(lambda: not any(t.name.startswith("an-executor") for t in threading.enumerate()), "the threads end")


def test_a_callback_may_take_its_time_while_nobody_waits() -> None:
    executor = Executor("an-executor", timeout=lambda: 0.01)
    asked, go_on = Asked(executor), threading.Event()
    chain = asked("a").get_future().then(lambda _: (go_on.wait(60), asked("b").wait()))
    asked.may_begin.set()
    wait_for(lambda: asked.done == ["a"], "it is done")
    threading.Timer(0.1, go_on.set).start()
    chain.wait()
    assert asked.done == ["a", "b"]
    assert executor.close(60)
