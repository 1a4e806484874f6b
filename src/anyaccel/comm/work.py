# SPDX-License-Identifier: Apache-2.0
"""Work objects of the `shm` backend, and the thread that carries out what was asked for asynchronously."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work
from torch.futures import Future

from anyaccel.errors import CommTimeoutError

# The C++ hook FP16_COMPRESS of DistributedDataParallel asks the future of a reduction of halves for a list of tensors;
# a future made in Python has a Python object. TorchScript's are typed, but are completed by torch's small pool of
# threads, where callbacks that wait for other futures would hold each other up: only halves, which those hooks use,
# take that way.
_TYPED = """
def after(done: Future[bool], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def typed(done: Future[bool], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, done, tensors)
"""


@functools.cache
def _typed() -> Any:
    return torch.jit.CompilationUnit(_TYPED).typed


def _are_halves(outputs: Any) -> bool:
    return bool(outputs) and all(isinstance(t, torch.Tensor) and t.dtype == torch.float16 for t in outputs)


def _ended_well(done: Future[Any]) -> bool:
    done.value()  # raises what went wrong
    return True


class ShmWork(Work):
    """One operation: waited for, or followed through its future.

    `outputs` is what the future gives: the tensors that the operation writes.
    """

    def __init__(self, outputs: Any, done: bool = False) -> None:
        super().__init__()
        self._outputs = outputs
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._finished = done
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None  # completed by `finish`
        self._result: Future[Any] | None = None  # what `get_future` gives
        self._then: Callable[[], None] | None = None
        self.source = -1  # of a message

    def finish(self, error: BaseException | None = None) -> None:
        """Told by whoever carries the operation out. Callbacks of the future are called here."""
        tell = self.end(error)
        if tell is not None:
            tell()

    def end(
        self, error: BaseException | None = None, nobody_follows: Callable[[], None] | None = None
    ) -> Callable[[], None] | None:
        """As `finish`, but callbacks are called by calling the result; None when there is nobody to tell.

        In that case `nobody_follows` is called before anybody sees that it has ended.
        """
        with self._lock:
            if self._future is None and nobody_follows is not None:
                nobody_follows()
            self._error = error
            self._finished = True
            event, future, then = self._event, self._future, self._then
        if then is not None:
            then()
        if event is not None:
            event.set()
        return None if future is None else functools.partial(self._tell, future)

    def _tell(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)

    def when_done(self, call: Callable[[], None]) -> None:
        """Have this called once it has ended."""
        with self._lock:
            if not self._finished:
                self._then = call
                return
        call()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raise what went wrong.

        Raises:
            CommError: the operation failed.
            CommTimeoutError: `timeout` has passed; the operation goes on.
        """
        if not self._finished:
            with self._lock:
                event = self._event = self._event or threading.Event()
                done: bool = self._finished  # meanwhile
            seconds = None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
            if not done and not event.wait(seconds):
                raise CommTimeoutError(f"the operation was not done within the timeout of {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._error

    def result(self) -> Any:
        """What the operation has written."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Of a received message: who sent it."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future with the tensors that were written."""
        with self._lock:
            if self._result is not None:
                return self._result
            future: Future[Any] = Future()
            finished = self._finished
            self._result = self._future = future
            if _are_halves(self._outputs):
                self._result = _typed()(future.then(_ended_well), list(self._outputs))
            result = self._result
        if finished:
            self._tell(future)
        return result


def register(work: Work, outputs: Any) -> None:
    """Have `wait_tensor` of the outputs wait for the work, where torch's own groups do: inside
    `allow_inflight_collective_as_graph_input_ctx`."""
    if c10d._allow_inflight_collective_as_graph_input():
        for tensor in _flat(outputs):
            c10d._register_work(tensor, c10d.PythonCallbackWork(work.wait))


def _flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for each in outputs or () for tensor in _flat(each)]


class JoinedWork(ShmWork):
    """Several as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__([])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if not self._finished:
            self.finish()
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future[Any]:
        """The futures of all, as one."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


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

# For how long what callbacks of a future ask for goes before what was asked for earlier, while they ask for nothing.
_CALLBACK_SECONDS = 5.0


class Line:
    """Operations of a group in the order in which they were asked for, on a thread that starts with the first.

    Callbacks of a future run on a thread of their own. What they ask for of this group is done right after the
    operation that they follow, before what is behind it: on all ranks in the same order, whenever the operation ends
    on each. So a callback may wait for it.
    """

    def __init__(
        self, name: str, on_change: Callable[[int], None] = lambda _: None, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """`on_change` is told how many are asked for and not done; `give_up` makes the one under way fail soon."""
        self._name = name
        self._give_up = give_up
        self._on_change = on_change
        self._jobs: _Jobs = queue.SimpleQueue()
        self._inner: dict[int, _Jobs] = {}  # by the thread that calls callbacks
        self._idle: list[_Caller] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.waiting = 0  # asked for and not done
        at_exit(self)

    def submit(self, run: Callable[[], None], outputs: Any) -> ShmWork:
        """Have `run` called after everything before it."""
        work = ShmWork(outputs)
        with self._lock:
            self._count(1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._inner.get(threading.get_ident(), self._jobs).put((run, work))
        return work

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
        error: BaseException | None = None
        try:
            run()
        except BaseException as problem:  # noqa: BLE001 (told to whoever waits)
            error = problem
        tell = work.end(error, self._one_less)
        del run, error, job, work
        if tell is not None:
            self._call(tell)
            # Only now: synchronous operations of other threads got in line behind what the callbacks asked for.
            self._one_less()

    def _call(self, tell: Callable[[], None]) -> None:
        """Have callbacks called on a thread of their own, and do what they ask for meanwhile."""
        with self._lock:
            caller = self._idle.pop() if self._idle else _Caller(self._name + "-callbacks")
            inner: _Jobs = queue.SimpleQueue()
            self._inner[caller.ident] = inner
        caller.call(tell, lambda: inner.put(None))
        del tell
        end = time.monotonic() + _CALLBACK_SECONDS
        while True:
            try:
                job = inner.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                if self._jobs.empty():
                    end = time.monotonic() + _CALLBACK_SECONDS
                    continue
                # It may wait for something that was asked for before.
                with self._lock:
                    del self._inner[caller.ident]
                    while not inner.empty():
                        if (late := inner.get()) is not None:
                            self._jobs.put(late)
                caller.forsake()
                return
            if job is None:
                break
            self._do(job)
            end = time.monotonic() + _CALLBACK_SECONDS
        with self._lock:
            del self._inner[caller.ident]
            closed = self._closed
            if not closed:
                self._idle.append(caller)
        if closed:
            caller.close()

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
