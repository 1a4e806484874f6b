# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.pin_memory: locked host memory, from the op that PinMemoryBuilder loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyaccel import env

from .._cover import cover
from ..ops import op_builder

__all__ = ["NativePinnedMemory", "get_active_native_pinned_memory", "get_native_pinned_memory"]


class NativePinnedMemory:
    """Tensors in locked memory, registered with an accelerator that does that, until the last of them is gone."""

    def __init__(self) -> None:
        try:
            builder: Any = op_builder.PinMemoryBuilder
            self._op = builder().load()
        except Exception as error:
            raise RuntimeError("DS_PIN_MEMORY_BACKEND=native: the op pin_memory does not load") from error

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A copy of `tensor`, or unfilled memory for one; flat unless `match_shape`."""
        locked: torch.Tensor = self._op.pin(tensor, make_copy, match_shape)
        return locked

    def pin_empty(self, example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Memory for a tensor of this shape, of the dtype of `example`."""
        locked: torch.Tensor = self._op.pin_empty(shape, example.dtype)
        return locked

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor, or what it is a view of, came from here and was not unpinned."""
        return bool(self._op.is_pinned(tensor))

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Unlock now; whether it was locked."""
        return bool(self._op.unpin(tensor))


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
