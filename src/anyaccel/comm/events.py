# SPDX-License-Identifier: Apache-2.0
"""Collectives as events of torch's profiler, named and shaped as those of torch's own backends are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import autograd

Run = Callable[[], None]

# Whether a profiler of this thread is on: torch's own function, since each operation asks.
wanted: Callable[[], bool] = autograd._profiler_enabled  # type: ignore[attr-defined]


def begin(backend: str, name: str, tensors: Sequence[torch.Tensor]) -> Run | None:
    """Begin an event where a profiler of this thread is on; the result ends it, from any thread."""
    if not wanted():
        return None
    record = autograd._record_function_with_args_enter(f"{backend}:{name}", *tensors)  # type: ignore[attr-defined]

    def end() -> None:
        # One that ends in another thread is shown as asynchronous: it overlaps with what its own thread does.
        last = threading.Thread(target=autograd._record_function_with_args_exit, args=(record,))  # type: ignore[attr-defined]
        last.start()
        last.join()

    return end


def recorded(backend: str, name: str, tensors: Sequence[torch.Tensor], run: Run) -> Run:
    """The operation; inside an event from now on to its end, where a profiler is on."""
    end = begin(backend, name, tensors)
    if end is None:
        return run

    def inside() -> None:
        try:
            run()
        finally:
            end()

    return inside
