# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.pin_memory: locked host memory, from `anyaccel.ops.aio`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from anyaccel import env
from anyaccel.accelerator.base import HOST
from anyaccel.ops.aio import memory

from .._cover import cover

__all__ = ["NativePinnedMemory", "get_active_native_pinned_memory", "get_native_pinned_memory"]


class NativePinnedMemory:
    """Tensors in locked memory, registered with an accelerator that does that, until the last of them is gone."""

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy of `tensor`, or unfilled memory for one; flat unless `match_shape`."""
        shape = tensor.shape if match_shape else (tensor.numel(),)
        locked = self.pin_empty(tensor, shape)
        if make_copy:
            locked.copy_(tensor.detach().reshape(shape))
        return locked

    def pin_empty(self, example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Memory for a tensor of this shape, of the dtype of `example`."""
        locked = memory.new_locked_tensor(math.prod(shape), example.dtype).view(tuple(shape))
        locked.ds_pinned = True  # type: ignore[attr-defined]
        return locked

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, or what it is a view of, came from here and was not unpinned."""
        if getattr(tensor, "ds_pinned", False):
            return True
        return tensor.device.type == HOST.type and type(tensor).__name__ != "FakeTensor" and memory.is_locked(tensor)

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Unlock now; whether it was locked."""
        tensor.ds_pinned = False  # type: ignore[attr-defined]
        return memory.free_locked_tensor(tensor)


_shared_native_pins: NativePinnedMemory | None = None


def get_native_pinned_memory() -> NativePinnedMemory:
    """The one of this process."""
    global _shared_native_pins
    if _shared_native_pins is None:
        _shared_native_pins = NativePinnedMemory()
    return _shared_native_pins


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """The same where DS_PIN_MEMORY_BACKEND is "native", else None: torch pins then."""
    return get_native_pinned_memory() if env.DS_PIN_MEMORY_BACKEND.get() == "native" else None


cover(globals())
