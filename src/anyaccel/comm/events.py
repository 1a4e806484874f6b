# SPDX-License-Identifier: Apache-2.0
"""Makes collectives visible to torch's tools: events for its profiler, and calls for CommDebugMode to count."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import autograd
from torch.utils import _python_dispatch

Run = Callable[[], None]
F = TypeVar("F", bound=Callable[..., Any])

# Whether a profiler records this thread. It is torch's own function without a wrapper, as every operation calls it.
wanted: Callable[[], bool] = autograd._profiler_enabled  # type: ignore[attr-defined]


def begin(backend: str, name: str, tensors: Sequence[torch.Tensor]) -> Run | None:
    """Begin an event if a profiler records this thread; the returned function ends it, on any thread."""
    if not wanted():
        return None
    record = autograd._record_function_with_args_enter(f"{backend}:{name}", *tensors)  # type: ignore[attr-defined]

    def end() -> None:
        # An event that ends in another thread is marked asynchronous: it overlaps with later events of its own thread.
        last = threading.Thread(target=autograd._record_function_with_args_exit, args=(record,))  # type: ignore[attr-defined]
        last.start()
        last.join()

    return end


def recorded(backend: str, name: str, tensors: Sequence[torch.Tensor], run: Run) -> Run:
    """The operation, inside an event that begins now if a profiler is on."""
    end = begin(backend, name, tensors)
    if end is None:
        return run

    def inside() -> None:
        try:
            run()
        finally:
            end()

    return inside


_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The torch functions that tell whether anything observes the operations of this thread.
WATCHERS: list[Callable[[], object]] = [wanted, _count_modes]


class _Operation:
    """A stand-in for an operator of torch, with what CommDebugMode reads of one."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self) -> None:
        """Does nothing: the group runs the operation."""

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"


def counted(name: str) -> Callable[[F], F]:
    """Make CommDebugMode count calls of a group's method as calls of `torch.ops.c10d.<name>`.

    torch counts in its dispatcher, which direct calls of a group in Python bypass. When torch's own operators call the
    group, they have counted already, and the modes are off.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if not _count_modes() or not (modes := _active_debug_modes()):
                return method(*args, **options)
            for mode in modes:
                mode.__torch_dispatch__(_Operation(name), ())
            # The modes are off inside, so that nested operations are not counted again, as in torch's own groups.
            with _python_dispatch._disable_current_modes():
                return method(*args, **options)

        return cast("F", call)

    return decorate


def _active_debug_modes() -> list[Any]:
    """The CommDebugModes that this thread is inside."""
    module = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    if module is None:
        return []
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    return [mode for mode in stack if isinstance(mode, module.CommDebugMode)]
