# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.init_on_device."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from .._cover import cover

__all__ = ["OnDevice"]


class OnDevice:
    """Inside it, tensors are made on a device, and floating-point ones in a dtype, unless they say otherwise.

    Args:
        dtype: a floating-point dtype.
        device: "meta" makes a model without its memory.
        enabled: False changes nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._before: list[tuple[torch.dtype, torch.device]] = []

    def __enter__(self) -> Self:
        if self.enabled:
            context = torch.device(self.device)
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            context.__enter__()
            self._before.append((before, context))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            before, context = self._before.pop()
            context.__exit__(kind, error, traceback)
            torch.set_default_dtype(before)


cover(globals())
