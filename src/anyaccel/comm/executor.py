# SPDX-License-Identifier: Apache-2.0
"""The thread that carries out what was asked for asynchronously, and those that call what follows it."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from anyaccel.comm.work import ShmWork
from anyaccel.errors import CommTimeoutError


class _Ends(Protocol):
    def end(self) -> None: ...


# How long the end of a program waits for what it has left under way.
EXIT_SECONDS = 2.0
_to_end: weakref.WeakSet[_Ends] = weakref.WeakSet()


def at_exit(what: _Ends) -> None:
    """Have `end()` of it called as the program ends, if it is still there."""
    _to_end.add(what)


@atexit.register
def _end_all() -> None:
    for each in list(_to_end):
        each.end()


# Threads and what is under way stay with the parent.
os.register_at_fork(after_in_child=_to_end.clear)


_Job = tuple[Callable[[], None], ShmWork]
_Jobs = queue.SimpleQueue[_Job | None]


class _Pause:
    """In the place of a job: the callbacks wait for an operation behind."""


_PAUSE = _Pause()


class _Callbacks:
    """Those of one operation, on a thread, and what they ask for."""

    def __init__(self, caller: _Caller) -> None:
        self.caller = caller
        self.jobs: queue.SimpleQueue[_Job | _Pause | None] = queue.SimpleQueue()
        self.own: weakref.WeakSet[ShmWork] = weakref.WeakSet()


class Executor:
    """Operations of a group in the order in which they were asked for, on a thread that starts with the first.

    Callbacks of a future run on a thread of their own. What they ask for of this group is done right after the
    operation that they follow, before what is behind it: on all ranks in the same order, whenever the operation ends
    on each. So a callback may wait for what it asks for. One that waits for an operation behind lets the executor go on
    and has its place right after that operation from then on: that depends on the program alone, not on how long
    anything takes.
    """

    def __init__(
        self,
        name: str,
        on_change: Callable[[int], None] = lambda _: None,
        give_up: Callable[[], None] = lambda: None,
        timeout: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """
        Args:
            name: of the threads.
            on_change: is told how many operations are asked for and not done.
            give_up: makes the one under way fail soon, here and on the peers.
            timeout: for how many seconds others may be waited for.
        """
        self._name = name
        self._give_up = give_up
        self._timeout = timeout
        self._on_change = on_change
        self._jobs: _Jobs = queue.SimpleQueue()
        self._callbacks: dict[int, _Callbacks] = {}  # under way, by their thread
        self._idle: list[_Caller] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._followed = 0  # operations whose callbacks the executor waits for
        self._broken: Exception | None = None
        self.waiting = 0  # asked for and not done
        at_exit(self)

    def submit(self, run: Callable[[], None], outputs: Any) -> ShmWork:
        """Have `run` called after everything before it."""
        work = ShmWork(outputs)
        work.waited_for = self._waited_for
        with self._lock:
            self._count(1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            callbacks = self._callbacks.get(threading.get_ident())
            if callbacks is None:
                self._jobs.put((run, work))
            else:
                callbacks.own.add(work)
                callbacks.jobs.put((run, work))
        return work

    def _waited_for(self, work: ShmWork) -> None:
        """Told by a thread that is about to wait: callbacks that wait for what is behind go on right after that."""
        with self._lock:
            callbacks = self._callbacks.get(threading.get_ident())
            if callbacks is not None and work not in callbacks.own and work.resume(callbacks):
                callbacks.jobs.put(_PAUSE)

    def _one_less(self) -> None:
        with self._lock:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.waiting += change
        self._on_change(self.waiting)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            del job

    def _do(self, job: _Job) -> None:
        run, work = job
        error: BaseException | None = self._broken
        if error is None:
            try:
                run()
            except BaseException as problem:  # noqa: BLE001 (told to whoever waits)
                error = problem
        tell, resumed = work.end(error, self._one_less)
        del run, error, job, work
        if tell is None and not resumed:
            return
        self._followed += 1
        if tell is not None:  # first: those that are resumed may wait for the future
            self._call(tell)
            del tell
        for callbacks in resumed:
            self._follow(callbacks)
        self._followed -= 1
        # Only now: synchronous operations of other threads got in line behind what the callbacks asked for.
        self._one_less()

    def _call(self, tell: Callable[[], None]) -> None:
        """Have callbacks called on a thread of their own, and do what they ask for meanwhile."""
        with self._lock:
            caller = self._idle.pop() if self._idle else _Caller(self._name + "-callbacks")
            callbacks = self._callbacks[caller.ident] = _Callbacks(caller)
        caller.call(tell, lambda: callbacks.jobs.put(None))
        del tell
        self._follow(callbacks)

    def _follow(self, callbacks: _Callbacks) -> None:
        """Do what callbacks ask for, until they end or wait for what is behind."""
        while True:
            patience = min(self._timeout(), threading.TIMEOUT_MAX)
            try:
                job = callbacks.jobs.get(timeout=patience)
            except queue.Empty:
                if self.waiting <= self._followed:
                    continue  # nobody waits
                self._break(patience)
                job = None
            if isinstance(job, _Pause):
                return
            if job is None:
                break
            self._do(job)
        with self._lock:
            del self._callbacks[callbacks.caller.ident]
            broken, closed = self._broken is not None, self._closed
            if not broken and not closed:
                self._idle.append(callbacks.caller)
            while not callbacks.jobs.empty():  # of callbacks that go on
                late = callbacks.jobs.get()
                if late is not None and not isinstance(late, _Pause):
                    self._jobs.put(late)
        if broken:
            callbacks.caller.forsake()
        elif closed:
            callbacks.caller.close()

    def _break(self, seconds: float) -> None:
        """Nothing behind may go before what the callbacks will ask for: other ranks may keep that order."""
        self._broken = CommTimeoutError(
            f"a callback of a future held up what was asked for behind it for the timeout of {seconds:g} s; one that "
            "waits for an operation behind it is to wait for its work, not for something that follows it"
        )
        self._give_up()

    def close(self, seconds: float | None = 5) -> bool:
        """End the threads, after what was asked for; whether that was within `seconds`."""
        with self._lock:
            self._closed = True
            if self._thread is not None:
                self._jobs.put(None)  # first: a Ctrl-C must not leave a thread that nobody ends
            thread, self._thread = self._thread, None
            idle, self._idle = self._idle, []
        for caller in idle:
            caller.close()
        if thread is None:
            return True
        if thread is not threading.current_thread():
            # Python 3.11 takes a thread for one that has ended when its join is interrupted; nobody asks afterwards.
            thread.join(seconds)
        return not thread.is_alive()

    def end(self) -> None:
        """As the program ends: a thread that is inside native code then would take the process down."""
        thread = self._thread
        if not self.close(EXIT_SECONDS) and thread is not None:
            self._give_up()
            thread.join(5)


class _Caller:
    """A thread that calls callbacks."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        assert thread.ident is not None
        self.ident = thread.ident
        self._thread = thread

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            what, then = call
            try:
                what()
            finally:
                then()
            del call, what, then

    def call(self, what: Callable[[], None], then: Callable[[], None]) -> None:
        """Have both called, one after the other."""
        self._calls.put((what, then))

    def forsake(self) -> None:
        """Have it end by itself, after what it was given."""
        self._calls.put(None)

    def close(self) -> None:
        """End it, after what it was given."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(5)
