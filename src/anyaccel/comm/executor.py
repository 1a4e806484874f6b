# SPDX-License-Identifier: Apache-2.0
"""The thread that runs a group's asynchronous operations, and the threads that run the callbacks of their futures."""

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

from anyaccel.comm.work import OperationWork
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


_Job = tuple[Callable[[], None], OperationWork]


class _Callbacks:
    """The callbacks of one operation's future, running on a thread of their own, and the operations they submit."""

    def __init__(self, thread: _CallbackThread) -> None:
        self.thread = thread
        # Entries are operations to run, a work that the callbacks wait for, or None when the callbacks have returned.
        self.jobs: queue.SimpleQueue[_Job | OperationWork | None] = queue.SimpleQueue()
        self.own: weakref.WeakSet[OperationWork] = weakref.WeakSet()
        self.has_priority = False  # the executor runs what they submit before everything else
        self.released = False  # they have lost that priority for good
        self.ended = False

    def end(self) -> None:
        """Called in their thread when they have returned, and submit nothing any more."""
        self.jobs.put(None)
        self.ended = True

    def is_over(self) -> bool:
        """Whether they have returned and all operations that they have submitted are done."""
        return self.ended and self.jobs.qsize() == 1


class Executor:
    """Runs the operations of a group in the order in which they were submitted, on a thread that the first one starts.

    All ranks must run operations in the same order. So the operations that a callback of a future submits run right
    after the operation that it belongs to, before those queued behind it, on every rank, however long anything takes;
    and a callback may wait for what it submits. A callback that waits for the work of an operation queued behind it
    lets the executor go on, and its own operations then run right after that one. A callback that waits for a later
    operation in another way looks the same as a slow one: after half of the timeout the executor goes on, and the
    callback's operations are queued like all others.

    There is no lock: garbage collection may run anything, such as the end of this group or a `__del__` that submits
    an operation, between any two steps of a thread. Threads share only queues; the rest belongs to the executor's.
    """

    _thread: threading.Thread | None = None

    def __init__(
        self,
        name: str,
        on_change: Callable[[int], None] = lambda _: None,
        abort: Callable[[], None] = lambda: None,
        timeout: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """
        Args:
            name: the name of the threads.
            on_change: called with 1 when an operation is submitted, and with -1 when one is done.
            abort: makes the operation under way fail soon, here and on the peers.
            timeout: returns the seconds that an operation may wait for other ranks.
        """
        self._name = name
        self._abort = abort
        self._timeout = timeout
        self._on_change = on_change
        self._process = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._callbacks: dict[int, _Callbacks] = {}  # running, by their thread
        self._prioritised: list[_Callbacks] = []  # a stack: the last one is served first
        self._idle: list[_CallbackThread] = []
        self._closed = self._ended = False
        self._open: deque[None] = deque()  # an entry for each operation that is not done, and each of `_prioritised`
        at_exit(self)

    @property
    def pending(self) -> int:
        """The number of operations that are not done, plus that of callbacks with priority."""
        return len(self._open)

    def _count(self, change: int) -> None:
        if change > 0:
            self._open.append(None)
        else:
            self._open.pop()
        self._on_change(change)

    def submit(self, run: Callable[[], None], outputs: Any) -> OperationWork:
        """Call `run` on the executor's thread, after everything that was submitted before."""
        work = OperationWork(outputs)
        work.before_wait = self._before_wait
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
            if callbacks.released:
                self._requeue(callbacks)
        return work

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        if vars(self).setdefault("_thread", thread) is not thread:
            return  # another thread has started it
        try:
            thread.start()
        except RuntimeError as error:
            del self._thread  # so that the next submit() tries again
            raise CommError(f"no thread could be started for asynchronous operations: {error}") from error

    def _refusal(self) -> CommError:
        if os.getpid() != self._process:
            return CommError("the group is of the process that this one was forked from: make one in this process")
        return CommError("the group has ended: make a new one")

    def _put(self, job: _Job) -> None:
        self._jobs.put(job)
        if self._ended:
            self._refuse_rest()

    def _requeue(self, callbacks: _Callbacks) -> None:
        """Move what released callbacks have submitted to the end of the queue."""
        for job in _drain(callbacks.jobs):
            if isinstance(job, tuple):
                self._put(job)

    def _refuse_rest(self) -> None:
        for job in _drain(self._jobs):
            if job is not None:
                self._count(-1)
                job[1].finish(self._refusal())

    def _before_wait(self, work: OperationWork) -> None:
        """Called by a thread before it waits for a work: callbacks that do go on right after that operation."""
        if threading.current_thread() is self._thread:
            raise CommError("what is done while the group's own thread works (a __del__) cannot wait for the group")
        callbacks = self._callbacks.get(threading.get_ident())
        if callbacks is not None and work not in callbacks.own:
            callbacks.jobs.put(work)

    # On the executor's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            del job
        for thread in self._idle:
            thread.close()
        self._ended = True
        for callbacks in list(self._callbacks.values()):
            callbacks.released = True
            self._requeue(callbacks)
        self._callbacks.clear()
        self._refuse_rest()

    def _next(self) -> _Job | None:
        """The next operation, those of callbacks with priority first; None when the executor is to end."""
        while self._prioritised:
            job = self._next_of(self._prioritised[-1])
            if job is not None:
                return job
        return self._jobs.get()

    def _run(self, job: _Job) -> None:
        run, work = job
        error: BaseException | None = None
        try:
            run()
        except BaseException as problem:  # noqa: BLE001 (raised where the work is waited for)
            error = problem
        complete, counted = work.end(error, lambda: self._count(-1))
        del run, error, job
        # Before this operation's own callbacks: those that resume may wait for its future.
        for callbacks in reversed(work.resumed):
            if not callbacks.released:
                self._give_priority(callbacks)
        del work
        if complete is not None:
            self._run_callbacks(complete)
            del complete
        # Only now, as other threads' synchronous operations must come after those that the callbacks submit.
        if not counted:
            self._count(-1)

    def _give_priority(self, callbacks: _Callbacks) -> None:
        if not callbacks.has_priority:
            callbacks.has_priority = True
            self._count(1)
            self._prioritised.append(callbacks)

    def _take_priority(self, callbacks: _Callbacks) -> None:
        callbacks.has_priority = False
        self._prioritised.remove(callbacks)
        self._count(-1)

    def _run_callbacks(self, complete: Callable[[], None]) -> None:
        """Run callbacks on a thread of their own, with priority for the operations that they submit."""
        # So that a chain in which each callback submits the next operation does not accumulate threads.
        for over in [each for each in self._prioritised if each.is_over()]:
            self._retire(over)
        try:
            thread = self._idle.pop() if self._idle else _CallbackThread(self._name + "-callbacks")
        except RuntimeError:
            logger.warning("no thread could be started for callbacks: they cannot wait for operations of the group")
            complete()
            return
        callbacks = self._callbacks[thread.ident] = _Callbacks(thread)
        self._give_priority(callbacks)
        thread.call(complete, callbacks.end)

    def _next_of(self, callbacks: _Callbacks) -> _Job | None:
        """The next operation that callbacks submit; None when they have lost their priority."""
        held = 0.0  # seconds that they have held up other operations
        while True:
            longest = min(self._timeout() / 2, threading.TIMEOUT_MAX)
            turn = max(min(longest - held, _WARN_SECONDS), 0.0)
            somebody_waits = self._closed or self.pending > len(self._prioritised)
            try:
                job = callbacks.jobs.get(timeout=turn)
            except queue.Empty:
                if not somebody_waits:
                    held = 0.0
                elif (held := held + turn) >= longest:
                    self._release(callbacks, held)
                    return None
                elif held == turn:
                    logger.warning(
                        "a callback of a future has held up what was asked for behind it for %.3g s: if it waits for "
                        "that, it is to wait for its work, not for something that follows it; after %.3g s the group "
                        "goes on",
                        held,
                        longest,
                    )
                continue
            if isinstance(job, tuple):
                return job
            if job is None:
                self._retire(callbacks)
                return None
            if not job.is_completed():
                job.resumed.append(callbacks)
                self._take_priority(callbacks)
                return None

    def _retire(self, callbacks: _Callbacks) -> None:
        self._take_priority(callbacks)
        del self._callbacks[callbacks.thread.ident]
        callbacks.released = True
        self._idle.append(callbacks.thread)

    def _release(self, callbacks: _Callbacks, seconds: float) -> None:
        logger.warning("the group goes on beside a callback of a future that held it up for %.3g s", seconds)
        del self._callbacks[callbacks.thread.ident]
        callbacks.released = True
        callbacks.thread.detach()
        self._requeue(callbacks)
        self._take_priority(callbacks)

    # ------------------------------------------------------------------------------------------------------------

    def close(self, seconds: float | None = 5) -> bool:
        """End the threads after all submitted operations; returns whether they have ended within `seconds`."""
        thread, was_closed, self._closed = self._thread, self._closed, True
        if thread is None or os.getpid() != self._process:
            return True
        if not was_closed:
            self._jobs.put(None)  # first: a Ctrl-C must not leave a thread that nobody ends
        if thread is not threading.current_thread():
            # After an interrupted join Python 3.11 considers the thread ended, but the result is not used then.
            thread.join(seconds)
        return not thread.is_alive()

    def end(self) -> None:
        """End the threads at exit: a thread that is in native code after that would crash the process."""
        thread = self._thread
        if not self.close(EXIT_SECONDS) and thread is not None:
            self._abort()
            thread.join(5)


def _drain(jobs: queue.SimpleQueue[Any]) -> Iterator[Any]:
    """All entries of a queue, removed from it; other threads may be taking entries at the same time."""
    while True:
        try:
            yield jobs.get_nowait()
        except queue.Empty:
            return


class _CallbackThread:
    """A reusable thread that runs callbacks."""

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
            except BaseException:  # the thread must survive for the next callbacks
                logger.exception("a callback of a future failed")
            then()
            del call, what, then

    def call(self, what: Callable[[], None], then: Callable[[], None]) -> None:
        """Make the thread call both, one after the other."""
        self._calls.put((what, then))

    def detach(self) -> None:
        """Let the thread end after its current call, without pending for it."""
        self._calls.put(None)

    def close(self) -> None:
        """Let the thread end after its current call, and wait for that."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(5)
