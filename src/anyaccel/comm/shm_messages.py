# SPDX-License-Identifier: Apache-2.0
"""send and recv of the `shm` backend."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from anyaccel import _native
from anyaccel.comm.dtypes import dtype_code
from anyaccel.comm.executor import EXIT_SECONDS, at_exit
from anyaccel.comm.tensors import Target, values
from anyaccel.comm.work import OperationWork

ANY = -1  # as a peer: any rank that sends
_PUMP_SECONDS = 0.05
_HEAD_START_SECONDS = 0.001  # before the thread handles a message: most are waited for at once where they were posted


class ShmMessageWork(OperationWork):
    """One message in flight."""

    def __init__(
        self,
        native: _native.Messages,
        message: _native.Message,
        tensor: torch.Tensor,
        memory: torch.Tensor,
        store: Callable[[], None],
    ) -> None:
        super().__init__([tensor])
        self._native, self._message, self._store = native, message, store
        self._memory = memory  # stays until the message is done
        self._open = [None]  # popped by the thread that finishes the work

    def try_finish(self) -> bool:
        """Finish the work if its message is complete; returns whether it is."""
        if not self._message.done:
            return False
        try:
            self._open.pop()
        except IndexError:  # another thread is finishing it, or this is a call from one of its callbacks
            return self._finished
        error: BaseException | None = None
        try:
            self._native.wait(self._message)
            self._store()
        except BaseException as problem:  # noqa: BLE001 (raised where the work is waited for)
            error = problem
        self.source = self._message.peer
        self.finish(error)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, making progress on all messages of the group meanwhile."""
        if timeout is not None and timeout.total_seconds() > 0:
            end = time.monotonic() + timeout.total_seconds()
            while not self.try_finish() and time.monotonic() < end:
                self._native.pump(min(_PUMP_SECONDS, max(end - time.monotonic(), 0.0)))
        elif not self._message.done:
            self._native.wait(self._message)
        self.try_finish()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Whether the message has ended, successfully or not."""
        return self.try_finish()


class Mailbox:
    """The messages of a group. A thread, started when first needed, makes progress on those that nobody waits for."""

    def __init__(self, native: _native.ShmGroup) -> None:
        self._native = _native.Messages(native)
        self._works: list[ShmMessageWork] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()
        at_exit(self)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> ShmMessageWork:
        """Start to send."""
        memory = values(tensor)
        message = self._native.send(memory.data_ptr(), memory.numel(), dtype_code(memory.dtype), peer, tag)
        return self._post(ShmMessageWork(self._native, message, tensor, memory, _nothing))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> ShmMessageWork:
        """Start to receive; `peer` may be ANY."""
        target = Target(tensor)
        memory = target.memory
        message = self._native.receive(memory.data_ptr(), memory.numel(), dtype_code(memory.dtype), peer, tag)
        return self._post(ShmMessageWork(self._native, message, tensor, memory, target.store))

    def _post(self, work: ShmMessageWork) -> ShmMessageWork:
        if work.try_finish():
            return work
        with self._changed:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="anyaccel-shm-messages", daemon=True)
                self._thread.start()
            self._changed.notify()
        return work

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._works and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                works = list(self._works)
            time.sleep(_HEAD_START_SECONDS)
            # Without the lock, as callbacks run here, and may wait for a message that another thread has yet to post.
            finished = {id(work) for work in works if work.try_finish()}
            with self._changed:
                self._works = [work for work in self._works if id(work) not in finished]
                if not self._works:
                    continue
            del works
            self._native.pump(_PUMP_SECONDS)

    def end(self) -> None:
        """Called at exit: give messages under way a moment to finish, then end the thread."""
        deadline = time.monotonic() + EXIT_SECONDS
        with self._changed:
            under_way = list(self._works)
        while not all(work.try_finish() for work in under_way) and time.monotonic() < deadline:
            self._native.pump(_PUMP_SECONDS)
        self.close()

    def close(self) -> None:
        """End the thread, and abandon messages that are under way."""
        if os.getpid() != self._process:
            return  # the thread is the parent's
        with self._changed:
            self._closed = True
            self._works.clear()
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)


def _nothing() -> None:
    pass
