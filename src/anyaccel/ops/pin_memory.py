# SPDX-License-Identifier: Apache-2.0
"""Locked host memory as an op, which `PinMemoryBuilder().load()` returns.

`pin_handle` is DeepSpeed's. Accelerators pin with the functions if DS_PIN_MEMORY_BACKEND is "native".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from anyaccel.accelerator.base import HOST
from anyaccel.ops.aio import memory

__all__ = ["is_pinned", "pin", "pin_empty", "pin_handle", "unpin"]


class pin_handle(memory.LockedTensors):
    """Makes and frees tensors in locked memory; a handle can also free the tensors of other handles."""

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """free_cpu_locked_tensor() for the tensor that begins at `address`."""
        return memory.free_locked(address)


def pin(tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
    """A copy of `tensor` in locked memory, or unfilled memory for one; flat unless `match_shape`."""
    shape = tensor.shape if match_shape else (tensor.numel(),)
    locked = pin_empty(shape, tensor.dtype)
    if make_copy:
        locked.copy_(tensor.detach().reshape(shape))
    return locked


def pin_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Locked memory for a tensor, registered with an accelerator that does that, until the last view of it is gone."""
    locked = memory.new_locked_tensor(math.prod(shape), dtype).view(tuple(shape))
    locked.ds_pinned = True  # type: ignore[attr-defined]
    # Kept for `unpin`, as moving a tensor to a device and back gives it other memory (`tensor.data = ...`).
    locked.ds_pin_base = locked.data_ptr()  # type: ignore[attr-defined]
    return locked


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or what it is a view of, is in locked memory and was not unpinned."""
    if getattr(tensor, "ds_pinned", False):
        return True
    return tensor.device.type == HOST.type and type(tensor).__name__ != "FakeTensor" and memory.is_locked(tensor)


def unpin(tensor: torch.Tensor) -> bool:
    """Unlock the tensor's memory now; returns whether it was locked."""
    tensor.ds_pinned = False  # type: ignore[attr-defined]
    address = getattr(tensor, "ds_pin_base", None)
    return memory.free_locked_tensor(tensor) if address is None else memory.free_locked(address)
