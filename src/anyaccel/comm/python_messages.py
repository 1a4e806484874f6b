# SPDX-License-Identifier: Apache-2.0
"""Messages of groups written in Python: carried on by whoever waits for them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch

from anyaccel.comm.tensors import Target
from anyaccel.comm.work import ShmWork
from anyaccel.errors import AnyAccelError


class Message(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta | None) -> None:
        """Wait for its end; None: the group's timeout."""

    def is_done(self) -> bool:
        """Whether it has ended, without waiting."""

    def source(self) -> int:
        """Who sent it; -1 for one that goes out."""


class MessageWork(ShmWork):
    """What `isend` and `irecv` give: carried on by whoever waits for it."""

    def __init__(self, message: Message, target: Target | None, outputs: list[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._message, self._target = message, target
        self._waiting = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raise what went wrong."""
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
        """Whether it has ended, well or not."""
        if not self._finished and self._message.is_done():
            self.wait()
        return self._finished

    def get_future(self) -> Any:
        """A future with the tensors; waits for the message."""
        self.wait()
        return super().get_future()
