# SPDX-License-Identifier: Apache-2.0
"""Work objects, as torch.distributed returns them for operations: wait for them, or use their future."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work
from torch.futures import Future

from anyaccel.comm.untraced import Untraced
from anyaccel.errors import CommError, CommTimeoutError

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


def _check_success(done: Future[Any]) -> bool:
    done.value()  # raises the operation's error
    return True


class _Result(Untraced, Future[Any]):
    """The future of a work, made in Python."""

    def __init__(self, work: OperationWork) -> None:
        super().__init__()
        self._work = weakref.ref(work)
        self._incomplete = [None]

    def complete(self, outputs: Any, error: BaseException | None) -> None:
        """Set the value and call the callbacks; does nothing the second time."""
        try:
            self._incomplete.pop()
        except IndexError:
            return
        if error is None:
            self.set_result(outputs)
        else:
            self.set_exception(error if isinstance(error, Exception) else CommError(repr(error)))

    def wait(self) -> Any:
        """Wait for the operation's outputs."""
        work = self._work()
        if work is not None:
            work.await_end()  # torch's own wait does not answer Ctrl-C
        del work
        return super().wait()


class OperationWork(Untraced, Work):
    """The work of one operation; `outputs` are the tensors that it writes, and the value of its future.

    There is no lock, for the reason that `Executor` gives. A thread that waits first registers, then checks whether the
    operation has ended; the thread that ends it first sets that, then looks for registered waiters.
    """

    def __init__(self, outputs: Any, done: bool = False) -> None:
        super().__init__()
        self._outputs = outputs
        self._finished = done
        self._error: BaseException | None = None
        self._waiters: list[threading.Event] = []
        self._on_end: list[Callable[[], None]] = []
        self.resumed: list[Any] = []  # used by the executor: callbacks that wait for this operation
        # Called in a thread that is about to wait for this work.
        self.before_wait: Callable[[OperationWork], None] | None = None
        self.source = -1  # the rank that has sent the message, for a receive

    # Both are set once, by `get_future`: the future that `end` completes, and the one that is returned.
    _future: _Result | None = None
    _result: Future[Any] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as ended, and call the callbacks of the future. Called once."""
        complete, _ = self.end(error)
        if complete is not None:
            complete()

    def end(
        self, error: BaseException | None = None, nobody_follows: Callable[[], None] | None = None
    ) -> tuple[Callable[[], None] | None, bool]:
        """Mark the operation as ended, without calling the callbacks of the future.

        Args:
            nobody_follows: called, before other threads can see the end, if there are neither callbacks nor `resumed`.

        Returns:
            A function that calls the callbacks (None if there are none), and whether `nobody_follows` was called.
        """
        called = nobody_follows is not None and self._future is None and not self.resumed
        if called and nobody_follows is not None:
            nobody_follows()
        self._error = error
        self._finished = True
        for waiter in list(self._waiters):
            waiter.set()
        self._call_on_end()
        future = self._future
        return None if future is None else functools.partial(future.complete, self._outputs, error), called

    def _call_on_end(self) -> None:
        while self._on_end:
            try:
                call = self._on_end.pop()
            except IndexError:  # the other thread has called it
                return
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this when the operation has ended, or now if it has."""
        self._on_end.append(call)
        if self._finished:
            self._call_on_end()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation.

        Raises:
            CommError: the operation failed.
            CommTimeoutError: `timeout` has passed; the operation goes on.
        """
        seconds = None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
        if not self.await_end(seconds):
            raise CommTimeoutError(f"the operation did not finish within the timeout of {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def await_end(self, seconds: float | None = None) -> bool:
        """Wait for the end, whether the operation succeeds or not; returns whether it has ended."""
        if self._finished:
            return True
        if self.before_wait is not None:
            self.before_wait(self)
        waiter = threading.Event()
        self._waiters.append(waiter)
        ended: bool = self._finished  # it may have ended before the waiter was registered
        return ended or waiter.wait(seconds)

    def synchronize(self) -> None:
        """The same as `wait`, under torch's other name."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        return self._finished

    def is_success(self) -> bool:
        """Whether the operation has ended successfully."""
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        """The error that the operation has ended with, or None."""
        return self._error

    def result(self) -> Any:
        """The tensors that the operation has written, after waiting for it."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """The rank that sent a received message."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future with the tensors that were written."""
        if self._result is None:
            # setdefault() is atomic: of several threads here, one sets the future.
            future = vars(self).setdefault("_future", _Result(self))
            result: Future[Any] = future
            if _are_halves(self._outputs):
                result = _typed()(future.then(_check_success), list(self._outputs))
            vars(self).setdefault("_result", result)
            if self._finished:
                future.complete(self._outputs, self._error)
        assert self._result is not None
        return self._result


class DoneWork(OperationWork):
    """The work of an operation that was complete when its call returned."""

    def __init__(self) -> None:
        super().__init__(None, done=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once: the operation has succeeded."""
        return True


def register(work: Work, outputs: Any) -> None:
    """Make `wait_tensor` of the outputs wait for the work, as torch's own groups do inside
    `allow_inflight_collective_as_graph_input_ctx`."""
    if c10d._allow_inflight_collective_as_graph_input():
        for tensor in _flat(outputs):
            c10d._register_work(tensor, c10d.PythonCallbackWork(work.wait))


def _flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for each in outputs or () for tensor in _flat(each)]


class JoinedWork(OperationWork):
    """Several works that are waited for as one."""

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
