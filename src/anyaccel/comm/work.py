# SPDX-License-Identifier: Apache-2.0
"""Work objects of groups: what is waited for, or followed through its future."""

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


def _ended_well(done: Future[Any]) -> bool:
    done.value()  # raises what went wrong
    return True


class _Result(Future[Any]):
    """The future of a work, made in Python."""

    def __init__(self, work: ShmWork) -> None:
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
        """Wait for what the operation gives."""
        work = self._work()
        if work is not None:
            work.await_end()  # torch's own wait does not answer Ctrl-C
        del work
        return super().wait()


class ShmWork(Work):
    """One operation: waited for, or followed through its future.

    `outputs` is what the future gives: the tensors that the operation writes.

    There is no lock, for the executor's reason. A thread that waits first registers, then looks whether the operation
    has ended; the thread that ends it first says so, then looks who has registered.
    """

    def __init__(self, outputs: Any, done: bool = False) -> None:
        super().__init__()
        self._outputs = outputs
        self._finished = done
        self._error: BaseException | None = None
        self._waiters: list[threading.Event] = []
        self._then: list[Callable[[], None]] = []
        self.resumed: list[Any] = []  # the executor's: callbacks that go on when this operation has ended
        # Called by a thread that is about to wait for this work.
        self.waited_for: Callable[[ShmWork], None] | None = None
        self.source = -1  # of a message

    # Set once by `get_future`: what `end` completes, and what is given to the caller.
    _future: _Result | None = None
    _result: Future[Any] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """The executor of the operation calls this, once, when it has ended. Calls the callbacks of the future."""
        complete, _ = self.end(error)
        if complete is not None:
            complete()

    def end(
        self, error: BaseException | None = None, nobody_follows: Callable[[], None] | None = None
    ) -> tuple[Callable[[], None] | None, bool]:
        """As `finish`, but leaves the callbacks to the caller: the first result calls them, None when there are none.

        Where there are neither callbacks nor `resumed`, `nobody_follows` is called before anybody sees that it has
        ended; the second result tells whether it was.
        """
        told = nobody_follows is not None and self._future is None and not self.resumed
        if told and nobody_follows is not None:
            nobody_follows()
        self._error = error
        self._finished = True
        for waiter in list(self._waiters):
            waiter.set()
        self._call_then()
        future = self._future
        return None if future is None else functools.partial(future.complete, self._outputs, error), told

    def _call_then(self) -> None:
        while self._then:
            try:
                call = self._then.pop()
            except IndexError:  # the other side has called it
                return
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        """Have this called once it has ended."""
        self._then.append(call)
        if self._finished:
            self._call_then()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raise what went wrong.

        Raises:
            CommError: the operation failed.
            CommTimeoutError: `timeout` has passed; the operation goes on.
        """
        seconds = None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
        if not self.await_end(seconds):
            raise CommTimeoutError(f"the operation was not done within the timeout of {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def await_end(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, well or not; whether it has."""
        if self._finished:
            return True
        if self.waited_for is not None:
            self.waited_for(self)  # the executor learns that this thread waits
        waiter = threading.Event()
        self._waiters.append(waiter)
        ended: bool = self._finished  # meanwhile
        return ended or waiter.wait(seconds)

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
        if self._result is None:
            # Several threads may be here; setdefault() makes one of them the first.
            future = vars(self).setdefault("_future", _Result(self))
            result: Future[Any] = future
            if _are_halves(self._outputs):
                result = _typed()(future.then(_ended_well), list(self._outputs))
            vars(self).setdefault("_result", result)
            if self._finished:
                future.complete(self._outputs, self._error)
        assert self._result is not None
        return self._result


class DoneWork(ShmWork):
    """The work of an operation that was complete when its call returned."""

    def __init__(self) -> None:
        super().__init__(None, done=True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once: the operation has succeeded."""
        return True


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
