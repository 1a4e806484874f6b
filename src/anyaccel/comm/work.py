# SPDX-License-Identifier: Apache-2.0
"""Work objects of the `shm` backend, and the thread that carries out what was asked for asynchronously."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from anyaccel.errors import CommTimeoutError


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
        self._future: Future[Any] | None = None
        self.source = -1  # of a message

    def finish(self, error: BaseException | None = None) -> None:
        """Told by whoever carries the operation out."""
        with self._lock:
            self._error = error
            self._finished = True
            event, future = self._event, self._future
        if event is not None:
            event.set()
        if future is not None:
            self._tell(future)

    def _tell(self, future: Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._outputs)

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
                raise CommTimeoutError(f"the operation was not done within {seconds:g} s")
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
            if self._future is not None:
                return self._future
            future: Future[Any] = Future()
            self._future = future
            finished = self._finished
        if finished:
            self._tell(future)
        return future


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


_Job = tuple[Callable[[], None], ShmWork]


class Line:
    """Operations of a group in the order in which they were asked for, on a thread that starts with the first."""

    def __init__(self, name: str, on_change: Callable[[int], None] = lambda _: None) -> None:
        """`on_change` is told how many are asked for and not done."""
        self._name = name
        self._on_change = on_change
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.waiting = 0  # asked for and not done

    def here(self) -> bool:
        """Whether the caller is this thread: a callback of a future, which must not wait for what is behind it."""
        return self._thread is threading.current_thread()

    def submit(self, run: Callable[[], None], outputs: Any) -> ShmWork:
        """Have `run` called after everything before it."""
        work = ShmWork(outputs)
        with self._lock:
            self.waiting += 1
            self._on_change(self.waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._jobs.put((run, work))
        return work

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, work = job
            error: BaseException | None = None
            try:
                run()
            except BaseException as problem:  # noqa: BLE001 (told to whoever waits)
                error = problem
            with self._lock:
                self.waiting -= 1
                self._on_change(self.waiting)
            work.finish(error)
            del job, run, work, error

    def close(self) -> None:
        """End the thread, after what was asked for."""
        with self._lock:
            if self._thread is not None:
                self._jobs.put(None)  # first: a Ctrl-C must not leave a thread that nobody ends
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            # Python 3.11 takes a thread for one that has ended when its join is interrupted; nobody asks afterwards.
            thread.join(5)
