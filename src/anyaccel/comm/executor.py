# SPDX-License-Identifier: Apache-2.0
"""The thread that carries out what was asked for asynchronously, and those that call what follows it."""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from anyaccel.comm.work import ShmWork
from anyaccel.errors import CommError

logger = logging.getLogger(__name__)


class _Ends(Protocol):
    def end(self) -> None: ...


# Seconds that the end of a program waits for operations that are still under way.
EXIT_SECONDS = 2.0
# Seconds after which a warning says that a callback holds up the operations behind it.
_WARN_SECONDS = 10.0
_to_end: weakref.WeakSet[_Ends] = weakref.WeakSet()


def at_exit(what: _Ends) -> None:
    """Call the object's `end()` when the program ends, if the object still exists then."""
    _to_end.add(what)


@atexit.register
def _end_all() -> None:
    for each in list(_to_end):
        each.end()


# A forked child has neither the parent's threads nor its operations.
os.register_at_fork(after_in_child=_to_end.clear)


_Job = tuple[Callable[[], None], ShmWork]


class _Callbacks:
    """The callbacks of one operation, which run on a thread of their own, and the operations that they submit."""

    def __init__(self, caller: _Caller) -> None:
        self.caller = caller
        # Entries are operations to run, a work that the callbacks wait for, or None when the callbacks have returned.
        self.jobs: queue.SimpleQueue[_Job | ShmWork | None] = queue.SimpleQueue()
        self.own: weakref.WeakSet[ShmWork] = weakref.WeakSet()
        self.followed = False  # the executor runs what they submit before all else
        self.let_go = False  # it has stopped doing so
        self.ended = False

    def end(self) -> None:
        """Their thread calls this when they have returned: they submit nothing any more."""
        self.jobs.put(None)
        self.ended = True

    def is_over(self) -> bool:
        """Whether all operations that they have submitted are done."""
        return self.ended and self.jobs.qsize() == 1


class Executor:
    """Operations of a group in the order in which they were asked for, on a thread that starts with the first.

    Callbacks of a future run on a thread of their own. What they ask for of this group is done right after the
    operation that they follow, before what is behind it: on all ranks in the same order, whenever the operation ends
    on each. So a callback may wait for what it asks for. One that waits for the work of an operation behind lets the
    executor go on and has its place right after that operation from then on: that depends on the program alone, not on
    how long anything takes. One that waits in another way for something behind cannot be told from one that takes its
    time: after half of the timeout the executor goes on, and the callback has no place of its own any more.

    There is no lock: garbage collection may run anything, such as the end of this group or a `__del__` that asks for
    an operation, between any two steps of a thread. Threads share queues, and what only the executor's own uses.
    """

    _thread: threading.Thread | None = None

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
            on_change: is told of one more that is asked for (1), and of one less (-1).
            give_up: makes the one under way fail soon, here and on the peers.
            timeout: for how many seconds others may be waited for.
        """
        self._name = name
        self._give_up = give_up
        self._timeout = timeout
        self._on_change = on_change
        self._process = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._callbacks: dict[int, _Callbacks] = {}  # under way, by their thread
        self._followed: list[_Callbacks] = []  # the last one comes first
        self._idle: list[_Caller] = []
        self._closed = self._ended = False
        self._open: deque[None] = deque()  # one for each that is asked for and not done, and for callbacks followed
        at_exit(self)

    @property
    def waiting(self) -> int:
        """How many operations are asked for and not done, or followed by callbacks that are not."""
        return len(self._open)

    def _count(self, change: int) -> None:
        if change > 0:
            self._open.append(None)
        else:
            self._open.pop()
        self._on_change(change)

    def submit(self, run: Callable[[], None], outputs: Any) -> ShmWork:
        """Call `run` on the executor's thread, after everything that was submitted before."""
        work = ShmWork(outputs)
        work.waited_for = self._waited_for
        callbacks = self._callbacks.get(threading.get_ident())
        if (self._closed and callbacks is None) or os.getpid() != self._process:
            work.finish(self._refusal())
            return work
        if self._thread is None and callbacks is None:
            self._start()
        self._count(1)
        if callbacks is None:
            self._put((run, work))
        else:
            callbacks.own.add(work)
            callbacks.jobs.put((run, work))
            if callbacks.let_go:
                self._put_back(callbacks)
        return work

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        if vars(self).setdefault("_thread", thread) is not thread:
            return  # another one was quicker
        try:
            thread.start()
        except RuntimeError as error:
            del self._thread  # the next one tries again
            raise CommError(f"no thread could be started for asynchronous operations: {error}") from error

    def _refusal(self) -> CommError:
        if os.getpid() != self._process:
            return CommError("the group is of the process that this one was forked from: make one in this process")
        return CommError("the group has ended: make a new one")

    def _put(self, job: _Job) -> None:
        self._jobs.put(job)
        if self._ended:
            self._refuse_rest()

    def _put_back(self, callbacks: _Callbacks) -> None:
        """Queue again, at the end, what callbacks submitted that are no longer served first."""
        for job in _taken(callbacks.jobs):
            if isinstance(job, tuple):
                self._put(job)

    def _refuse_rest(self) -> None:
        for job in _taken(self._jobs):
            if job is not None:
                self._count(-1)
                job[1].finish(self._refusal())

    def _waited_for(self, work: ShmWork) -> None:
        """A thread calls this before it waits: callbacks that wait for a later operation go on right after that one."""
        if threading.current_thread() is self._thread:
            raise CommError("what is done while the group's own thread works (a __del__) cannot wait for the group")
        callbacks = self._callbacks.get(threading.get_ident())
        if callbacks is not None and work not in callbacks.own:
            callbacks.jobs.put(work)

    # On the executor's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)
            del job
        for caller in self._idle:
            caller.close()
        self._ended = True
        for callbacks in list(self._callbacks.values()):
            callbacks.let_go = True
            self._put_back(callbacks)
        self._callbacks.clear()
        self._refuse_rest()

    def _next(self) -> _Job | None:
        """The next operation to run, those submitted by callbacks first; None when the executor is to end."""
        while self._followed:
            job = self._asked_by(self._followed[-1])
            if job is not None:
                return job
        return self._jobs.get()

    def _do(self, job: _Job) -> None:
        run, work = job
        error: BaseException | None = None
        try:
            run()
        except BaseException as problem:  # noqa: BLE001 (told to whoever waits)
            error = problem
        complete, counted = work.end(error, lambda: self._count(-1))
        del run, error, job
        # The last ones are served first: callbacks that go on may wait for the future of this operation.
        for callbacks in reversed(work.resumed):
            if not callbacks.let_go:
                self._follow(callbacks)
        del work
        if complete is not None:
            self._call(complete)
            del complete
        # Not before: synchronous operations of other threads have to come after those that the callbacks submit.
        if not counted:
            self._count(-1)

    def _follow(self, callbacks: _Callbacks) -> None:
        if not callbacks.followed:
            callbacks.followed = True
            self._count(1)
            self._followed.append(callbacks)

    def _unfollow(self, callbacks: _Callbacks) -> None:
        callbacks.followed = False
        self._followed.remove(callbacks)
        self._count(-1)

    def _call(self, complete: Callable[[], None]) -> None:
        """Run callbacks on a thread of their own, and the operations that they submit meanwhile on this one."""
        # A chain in which each callback submits the next operation must take neither threads nor memory as it grows.
        for over in [each for each in self._followed if each.is_over()]:
            self._end(over)
        try:
            caller = self._idle.pop() if self._idle else _Caller(self._name + "-callbacks")
        except RuntimeError:
            logger.warning("no thread could be started for callbacks: they cannot wait for operations of the group")
            complete()
            return
        callbacks = self._callbacks[caller.ident] = _Callbacks(caller)
        self._follow(callbacks)
        caller.call(complete, callbacks.end)

    def _asked_by(self, callbacks: _Callbacks) -> _Job | None:
        """The next operation that callbacks submit; None when they are not to be served first any longer."""
        held = 0.0  # seconds that they have held up others
        while True:
            patience = min(self._timeout() / 2, threading.TIMEOUT_MAX)
            turn = max(min(patience - held, _WARN_SECONDS), 0.0)
            somebody_waits = self._closed or self.waiting > len(self._followed)
            try:
                job = callbacks.jobs.get(timeout=turn)
            except queue.Empty:
                if not somebody_waits:
                    held = 0.0
                elif (held := held + turn) >= patience:
                    self._let_go(callbacks, held)
                    return None
                elif held == turn:
                    logger.warning(
                        "a callback of a future has held up what was asked for behind it for %.3g s: if it waits for "
                        "that, it is to wait for its work, not for something that follows it; after %.3g s the group "
                        "goes on",
                        held,
                        patience,
                    )
                continue
            if isinstance(job, tuple):
                return job
            if job is None:
                self._end(callbacks)
                return None
            if not job.is_completed():
                job.resumed.append(callbacks)
                self._unfollow(callbacks)
                return None

    def _end(self, callbacks: _Callbacks) -> None:
        self._unfollow(callbacks)
        del self._callbacks[callbacks.caller.ident]
        callbacks.let_go = True
        self._idle.append(callbacks.caller)

    def _let_go(self, callbacks: _Callbacks, seconds: float) -> None:
        logger.warning("the group goes on beside a callback of a future that held it up for %.3g s", seconds)
        del self._callbacks[callbacks.caller.ident]
        callbacks.let_go = True
        callbacks.caller.forsake()
        self._put_back(callbacks)
        self._unfollow(callbacks)

    # ------------------------------------------------------------------------------------------------------------

    def close(self, seconds: float | None = 5) -> bool:
        """End the threads, after what was asked for; whether that was within `seconds`."""
        thread, was_closed, self._closed = self._thread, self._closed, True
        if thread is None or os.getpid() != self._process:
            return True
        if not was_closed:
            self._jobs.put(None)  # first: a Ctrl-C must not leave a thread that nobody ends
        if thread is not threading.current_thread():
            # Python 3.11 takes a thread for one that has ended when its join is interrupted; nobody asks afterwards.
            thread.join(seconds)
        return not thread.is_alive()

    def end(self) -> None:
        """End the threads when the program ends: one that is inside native code by then would crash the process."""
        thread = self._thread
        if not self.close(EXIT_SECONDS) and thread is not None:
            self._give_up()
            thread.join(5)


def _taken(jobs: queue.SimpleQueue[Any]) -> Iterator[Any]:
    """All entries of a queue, removed from it; other threads may be taking entries at the same time."""
    while True:
        try:
            yield jobs.get_nowait()
        except queue.Empty:
            return


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
            except BaseException:  # the thread is there for the next ones too
                logger.exception("a callback of a future failed")
            then()
            del call, what, then

    def call(self, what: Callable[[], None], then: Callable[[], None]) -> None:
        """Have both called, one after the other."""
        self._calls.put((what, then))

    def forsake(self) -> None:
        """Let the thread end by itself once it has done what it was given; nobody waits for it."""
        self._calls.put(None)

    def close(self) -> None:
        """End the thread once it has done what it was given, and wait for that."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(5)
