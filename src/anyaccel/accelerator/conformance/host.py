# SPDX-License-Identifier: Apache-2.0
"""Page-locked host memory. Where the device has no use for it, ordinary memory serves."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.accelerator.base import HOST, Accelerator
from anyaccel.accelerator.conformance.checking import (
    check,
    expect,
    expect_equal,
    expect_error,
    expect_none,
    expect_type,
)
from anyaccel.accelerator.spec import Capability
from anyaccel.errors import UsageError

_PAGE = 4096


def _expect_host_memory(accelerator: Accelerator, what: str, tensor: torch.Tensor) -> None:
    """Locked where the device has pinned memory, and it can be copied to the device."""
    expect(isinstance(tensor, torch.Tensor), f"{what} a tensor", tensor)
    expect_equal(f"{what} on", tensor.device.type, HOST.type)
    pinned = accelerator.is_pinned(tensor)
    expect_type(f"is_pinned({what})", pinned, bool)
    expect_equal(f"is_pinned({what})", pinned, accelerator.has(Capability.PINNED_MEMORY))


@check("host memory", "pin_memory", "is_pinned", "unpin_memory")
def check_pin_memory_keeps_the_contents(accelerator: Accelerator) -> None:
    """A locked copy, or the tensor itself; what is copied from it arrives."""
    values = torch.arange(5000, dtype=torch.float32, device=HOST).reshape(50, 100)
    expect_equal("is_pinned() of ordinary memory", accelerator.is_pinned(values), False)
    align_bytes: Any = 1  # the second argument once was this
    for what, pinned in (
        ("pin_memory(t)", accelerator.pin_memory(values)),
        ("pin_memory(t, 1)", accelerator.pin_memory(values, align_bytes)),
        ("pin_memory(t, align_bytes=1)", accelerator.pin_memory(values, align_bytes=1)),
    ):
        _expect_host_memory(accelerator, what, pinned)
        expect(torch.equal(pinned, values), f"{what} with the contents of t", pinned)
        copied = pinned.to(accelerator.current_device_name(), non_blocking=True)
        accelerator.synchronize()
        expect(torch.equal(copied.to(HOST), values), f"what is copied from {what} to arrive", copied)
    empty = accelerator.pin_memory(values, make_copy=False)
    expect_equal("pin_memory(t, make_copy=False) of shape", tuple(empty.shape), (50, 100))
    if accelerator.has(Capability.PINNED_MEMORY):
        flat = accelerator.pin_memory(values, make_copy=False, match_shape=False)
        expect_equal("pin_memory(t, make_copy=False, match_shape=False) of shape", tuple(flat.shape), (5000,))
        _expect_host_memory(accelerator, "pin_memory(t, make_copy=False)", empty)
    expect_none("unpin_memory()", accelerator.unpin_memory, accelerator.pin_memory(values))
    expect_equal("after unpin_memory(), the last value of t", values[-1, -1].item(), 4999.0)


@check("host memory", "pin_empty", "pin_empty_like")
def check_pin_empty_makes_host_memory(accelerator: Accelerator) -> None:
    """Of the shape and type that is asked for; only the host makes sense."""
    on_device = torch.ones(3, 4, device=accelerator.current_device_name())
    for what, tensor, shape, dtype in (
        ("pin_empty(2, 3)", accelerator.pin_empty(2, 3, dtype=torch.float32), (2, 3), torch.float32),
        ("pin_empty((4, 5))", accelerator.pin_empty((4, 5), dtype=torch.int64), (4, 5), torch.int64),
        ("pin_empty_like(t)", accelerator.pin_empty_like(on_device), (3, 4), torch.float32),
        ("pin_empty_like(t, dtype)", accelerator.pin_empty_like(on_device, dtype=torch.int8), (3, 4), torch.int8),
    ):
        _expect_host_memory(accelerator, what, tensor)
        expect_equal(f"{what} of shape", tuple(tensor.shape), shape)
        expect_equal(f"{what} of dtype", tensor.dtype, dtype)
        tensor.fill_(1)
        expect_equal(f"{what}, filled with ones, to have the sum", int(tensor.sum()), tensor.numel())
    for method, call in (
        ("pin_empty", lambda: accelerator.pin_empty(2, dtype=torch.float32, device="meta")),
        ("pin_empty_like", lambda: accelerator.pin_empty_like(on_device, device="meta")),
    ):
        expect_error(f"{method}(device='meta')", call, UsageError, "meta")


@check("host memory", "pin_memory_alignment")
def check_the_alignment_is_a_power_of_two(accelerator: Accelerator) -> None:
    """In bytes."""
    alignment = accelerator.pin_memory_alignment()
    expect_type("pin_memory_alignment()", alignment, int)
    expect(alignment > 0 and alignment & (alignment - 1) == 0, "pin_memory_alignment() a power of two", alignment)


@check("host memory", "register_host_memory", "unregister_host_memory")
def check_existing_memory_is_registered_and_released(accelerator: Accelerator) -> None:
    """Twice, so the first release was one; what is copied from it arrives."""
    size = 16 * _PAGE
    alignment = max(_PAGE, accelerator.pin_memory_alignment())
    memory = torch.zeros(size + alignment, dtype=torch.uint8, device=HOST)
    skipped = -memory.data_ptr() % alignment
    block = memory[skipped : skipped + size]
    for value in (7, 9):
        answer = accelerator.register_host_memory(block.data_ptr(), size)
        expect(answer is True, "register_host_memory() to return True", answer)
        try:
            block.fill_(value)
            copied = block.to(accelerator.current_device_name(), non_blocking=True)
            accelerator.synchronize()
            expect(bool((copied.to(HOST) == value).all()), f"registered memory to arrive as {value}", copied)
        finally:
            expect_none("unregister_host_memory()", accelerator.unregister_host_memory, block.data_ptr())
