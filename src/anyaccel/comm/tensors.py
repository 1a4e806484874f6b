# SPDX-License-Identifier: Apache-2.0
"""Tensors as native code takes them: dense memory on the CPU."""

from __future__ import annotations

import torch

from anyaccel.errors import UsageError


def check(tensor: torch.Tensor) -> None:
    """Whether the backend can work on this tensor at all.

    Raises:
        UsageError: it is not on the CPU, or not an array.
    """
    if tensor.device.type != "cpu":
        raise UsageError(f"backend shm works on CPU tensors; this one is on {tensor.device}")
    if tensor.layout != torch.strided:
        raise UsageError(f"backend shm works on dense and strided tensors; this one is {tensor.layout}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory holds just the tensor's values in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as a plain tensor; itself where it is one. Autograd does not see it."""
    check(tensor)
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


class Target:
    """Where an output is written: the tensor itself or, where its memory is not plain, a tensor that is copied over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        check(tensor)
        self._tensor = tensor.detach()
        plain = is_plain(self._tensor)
        self.memory = self._tensor if plain else torch.empty(tensor.shape, dtype=tensor.dtype)

    def store(self) -> None:
        """Bring what was written to the tensor."""
        if self.memory is not self._tensor:
            self._tensor.copy_(self.memory)


class Values(Target):
    """What is read and written in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        if self.memory is not self._tensor:
            self.memory = values(self._tensor)


def same_dtype(tensors: list[torch.Tensor], what: str) -> None:
    """Raise UsageError unless all have one dtype."""
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise UsageError(f"{what} needs tensors of one dtype; got {', '.join(sorted(map(str, found)))}")
