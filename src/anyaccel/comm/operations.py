# SPDX-License-Identifier: Apache-2.0
"""The operations on dense tensors that a process group written in Python implements."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyaccel.comm.messages import Message
from anyaccel.comm.torch_backend import TorchGroup
from anyaccel.errors import CommError, UsageError

Wait = Callable[[], None]


class MismatchError(CommError):
    """Ranks have called different operations. All ranks know: none waits, and the group stays usable."""


class Operations(TorchGroup):
    """The operations that a subclass implements: a call starts one, and returns what waits for it; None where it is
    complete.

    Tensors are dense; lists have one entry for each rank; reductions have the numbers of `dtypes`.

    Attributes:
        NAME: the name of the backend.
    """

    NAME = ""

    def start_all_reduce(self, tensor: torch.Tensor, op: int) -> Wait | None:
        raise self._lacks("all_reduce")

    def start_reduce(self, tensor: torch.Tensor, op: int, root: int) -> Wait | None:
        """Reduce in place on `root`; other ranks' tensors stay as they are."""
        raise self._lacks("reduce")

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Wait | None:
        raise self._lacks("broadcast")

    def start_all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Wait | None:
        """Sizes may differ from rank to rank."""
        raise self._lacks("all_gather")

    def start_reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: int) -> Wait | None:
        raise self._lacks("reduce_scatter")

    def start_all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Wait | None:
        """Sizes may differ from pair to pair."""
        raise self._lacks("all_to_all")

    def start_gather(self, outputs: list[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Wait | None:
        raise self._lacks("gather")

    def start_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor] | None, root: int) -> Wait | None:
        raise self._lacks("scatter")

    def start_send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        raise self._lacks("send")

    def start_recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Message:
        """Receive from `peer`, or from any rank if it is None."""
        raise self._lacks("recv")

    def start_barrier(self) -> Wait | None:
        raise self._lacks("barrier")

    def failed(self) -> None:
        """Called when an operation has failed."""

    def _lacks(self, what: str) -> UsageError:
        return UsageError(f"backend {self.NAME} has no {what}; use a group of backend shm or gloo for it")
