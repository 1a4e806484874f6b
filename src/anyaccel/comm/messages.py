# SPDX-License-Identifier: Apache-2.0
"""Messages of process groups written in Python, which make progress only while somebody waits for them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch

from anyaccel.comm.tensors import Target
from anyaccel.comm.work import OperationWork
from anyaccel.errors import AnyAccelError


class Message(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta | None) -> None:
        """Wait until it is complete, at most for the group's timeout if `timeout` is None."""

    def is_done(self) -> bool:
        """Whether it is complete, without waiting."""

    def source(self) -> int:
        """The rank that sent it; -1 for a message of this rank."""


class MessageWork(OperationWork):
    """The work that `isend` and `irecv` return."""

    def __init__(self, message: Message, target: Target | None, outputs: list[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._message, self._target = message, target
        self._waiting = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete; raise its error if it failed."""
        with self._waiting:
            if not self._finished:
                error: BaseException | None = None
                try:
                    self._message.wait(timeout if timeout is not None and timeout > timedelta(0) else None)
                    if self._target is not None:
                        self._target.store()
                        self.source = self._message.source()
                except (RuntimeError, AnyAccelError) as problem:
                    error = problem
                self.finish(error)
        return super().wait()

    def is_completed(self) -> bool:
        """Whether the message has ended, successfully or not."""
        if not self._finished and self._message.is_done():
            self.wait()
        return self._finished

    def get_future(self) -> Any:
        """A future with the tensors, after waiting for the message."""
        self.wait()
        return super().get_future()
