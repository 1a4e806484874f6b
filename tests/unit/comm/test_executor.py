# SPDX-License-Identifier: Apache-2.0
"""The threads of a group: what is asked for is done and they end, also where Ctrl-C comes meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from anyaccel.comm.executor import Executor
from anyaccel.comm.shm_group import _stop
from anyaccel.comm.work import OperationWork
from anyaccel.errors import CommError
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
    assert asked.executor.pending == 0


def in_time(what: Callable[[], Any]) -> Any:
    """The result, on a thread of its own: what never ends fails this test only."""
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(what())
        except BaseException as error:  # noqa: BLE001 (raised by result())
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(60)


def test_beside_a_callback_that_never_ends_the_executor_goes_on() -> None:
    given_up: list[bool] = []
    executor = Executor("an-executor", abort=lambda: given_up.append(True), timeout=lambda: 0.1)
    asked, go_on, ended = Asked(executor), threading.Event(), threading.Event()

    def callback(_: Any) -> None:
        assert go_on.wait(60)
        asked("late").wait()
        ended.set()

    asked("a").get_future().then(callback)
    behind = asked("b")
    asked.may_begin.set()
    behind.wait()
    assert asked.done == ["a", "b"]
    go_on.set()
    assert ended.wait(60)
    asked("c").wait()
    assert asked.done == ["a", "b", "late", "c"]
    assert not given_up
    assert in_time(lambda: executor.close(None))
    wait_for(lambda: not any(t.name.startswith("an-executor") for t in threading.enumerate()), "the threads end")


@pytest.mark.parametrize("way", ["chained", "all", "event"])
def test_a_callback_may_wait_in_any_way_for_what_is_behind(way: str) -> None:
    executor = Executor("an-executor", timeout=lambda: 0.1)
    asked, known, set_by_behind = Asked(executor), threading.Event(), threading.Event()
    behind: list[Any] = []

    def callback(_: Any) -> str:
        assert known.wait(60)
        if way == "event":
            assert set_by_behind.wait(60)
        elif way == "all":
            torch.futures.collect_all([work.get_future() for work in behind]).wait()
        else:
            behind[0].get_future().then(lambda _: None).wait()
        return asked("of callback").result()

    chain = asked("a").get_future().then(callback)
    behind += [asked("b"), asked("c")]
    behind[1].get_future().then(lambda _: set_by_behind.set())
    known.set()
    asked.may_begin.set()
    assert in_time(chain.wait) == "of callback"
    assert sorted(asked.done) == ["a", "b", "c", "of callback"]
    assert executor.close(60)


def test_a_group_ends_beside_a_callback_that_does_not() -> None:
    executor, go_on = Executor("an-executor", timeout=lambda: 0.1), threading.Event()
    asked = Asked(executor)
    chain = asked("a").get_future().then(lambda _: go_on.wait(60))
    asked.may_begin.set()
    assert in_time(lambda: executor.close(None))
    go_on.set()
    chain.wait()
    with pytest.raises(CommError, match="the group has ended"):
        asked("b").wait()
    wait_for(lambda: not any(t.name.startswith("an-executor") for t in threading.enumerate()), "the threads end")


def test_garbage_collection_in_the_midst_may_ask_for_anything() -> None:
    """It runs between any two steps: here, where the executor says that it is asked or has done something."""
    done: list[str] = []

    def collected(change: int) -> None:
        if "collected" not in done:
            done.append("collected")
            executor.submit(lambda: done.append("of __del__"), None).get_future()
        elif change < 0:
            executor.close(0)

    executor = Executor("an-executor", collected)
    in_time(executor.submit(lambda: done.append("a"), None).wait)
    assert in_time(lambda: executor.close(60))
    assert sorted(done) == ["a", "collected", "of __del__"]


def test_a_work_may_be_looked_at_while_it_ends() -> None:
    work = OperationWork("tensors")
    during: list[Any] = []

    def look() -> None:
        during.append(in_time(work.get_future))

    complete, told = work.end(None, look)
    assert complete is not None
    assert told
    complete()
    complete()  # a second time is no mistake
    assert during[0].wait() == "tensors"


def test_an_interrupt_ends_the_wait_for_a_future(asked: Asked) -> None:
    future = asked("a").get_future()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    asked.may_begin.set()
    assert future.wait() == "a"


def test_what_ends_by_an_interrupt_is_told_to_who_follows_it(asked: Asked) -> None:
    def interrupted() -> None:
        asked.may_begin.wait(60)
        raise KeyboardInterrupt

    for _ in range(2):  # the thread for callbacks is there for the second too
        asked.may_begin.clear()
        future = asked.executor.submit(interrupted, None).get_future()
        behind = asked("b")
        asked.may_begin.set()
        with pytest.raises(CommError, match="KeyboardInterrupt"):
            in_time(future.wait)
        in_time(behind.wait)


def test_a_callback_whose_callback_asks_again_takes_no_threads(asked: Asked) -> None:
    threads: set[int] = set()
    end = threading.Event()

    def again(left: int) -> None:
        threads.add(threading.get_ident())
        if left == 0:
            end.set()
        else:
            asked("x").get_future().then(lambda _: again(left - 1))

    asked.may_begin.set()
    again(2000)
    assert end.wait(60)
    assert len(threads) < 500  # of a few callbacks that have not quite ended
    wait_for(lambda: asked.executor.pending == 0, "all is done")


def test_the_executors_own_thread_cannot_wait_for_it(asked: Asked) -> None:
    asked.may_begin.set()
    work = asked.executor.submit(lambda: asked("later").wait(), None)
    with pytest.raises(CommError, match="own thread"):
        in_time(lambda: work.wait())
    assert asked.done in ([], ["later"])


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
