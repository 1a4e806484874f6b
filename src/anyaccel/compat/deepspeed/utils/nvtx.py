# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils.nvtx: ranges in the accelerator's profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from anyaccel.accelerator import get_accelerator

from .._cover import cover

__all__ = ["instrument_w_nvtx"]

P = ParamSpec("P")
T = TypeVar("T")


def instrument_w_nvtx(func: Callable[P, T]) -> Callable[P, T]:
    """Decorator: each call of the function is a range of its name."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return call


cover(globals())
