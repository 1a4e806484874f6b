# SPDX-License-Identifier: Apache-2.0
"""Memory figures are in bytes and move as a tensor comes and goes.

Figures may be noisy: those of a host are the resident set of the process. Hence a large tensor and wide bounds; a
figure in KiB, or one that stands still, is still far outside of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

import torch

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.checking import (
    ConformanceError,
    UncheckedError,
    check,
    expect,
    expect_equal,
    expect_none,
    expect_type,
)
from anyaccel.accelerator.spec import CAPABILITY_OF

_MIB = 1 << 20
_BLOCK = 64 * _MIB
# By how much a figure may be off: rounding by the allocator, and what else the process does meanwhile.
_NOISE = 16 * _MIB
_MOST_BLOCKS = 32


@contextlib.contextmanager
def _calm(accelerator: Accelerator) -> Iterator[None]:
    """Run on one thread and one CPU: the kernel counts resident pages per CPU, and adds them up only now and then."""
    threads = torch.get_num_threads()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    gc.collect()  # else garbage that is freed meanwhile would change the figure
    try:
        if allowed:
            os.sched_setaffinity(0, [min(allowed)])
        torch.set_num_threads(1)
        accelerator.synchronize()
        accelerator.empty_cache()  # a tensor that fits into memory which is cached would not show
        yield
    finally:
        torch.set_num_threads(threads)
        if allowed:
            os.sched_setaffinity(0, allowed)


def _block(accelerator: Accelerator) -> torch.Tensor:
    """A tensor of _BLOCK bytes, every page written."""
    tensor = torch.ones(_BLOCK, dtype=torch.uint8, device=accelerator.current_device_name())
    accelerator.synchronize()
    return tensor


def _figure(accelerator: Accelerator, method: str) -> int:
    """The figure, asked without and with an index."""
    value: int = getattr(accelerator, method)()
    expect_type(f"{method}()", value, int)
    expect(value >= 0, f"{method}() of 0 bytes or more", value)
    by_index = getattr(accelerator, method)(accelerator.current_device())
    expect_type(f"{method}(index)", by_index, int)
    expect_close(f"{method}(index)", by_index, f"{method}()", value)
    return value


def expect_close(what: str, value: int, other_name: str, other: int) -> None:
    """Two figures that are the same but for what the process does between the two calls."""
    expect(abs(value - other) <= _NOISE, f"{what} about as {other_name}, {other} bytes", value)


def _expect_growth(what: str, grown: int) -> None:
    least, most = _BLOCK - _NOISE, _BLOCK + 2 * _NOISE
    expect(least <= grown <= most, f"{what} to grow by about {_BLOCK} bytes with a tensor of that size", grown)


@check("memory", "memory_allocated")
def check_memory_allocated_grows_and_shrinks_with_a_tensor(accelerator: Accelerator) -> None:
    """By its size in bytes."""
    with _calm(accelerator):
        before = _figure(accelerator, "memory_allocated")
        block = _block(accelerator)
        _expect_growth("memory_allocated()", _figure(accelerator, "memory_allocated") - before)
        del block
        accelerator.synchronize()
        accelerator.empty_cache()
        left = _figure(accelerator, "memory_allocated") - before
        expect(left <= _NOISE, "memory_allocated() to shrink as the tensor goes", f"{left} bytes more than before")


@check("memory", "memory_reserved")
def check_memory_reserved_is_at_least_what_is_allocated(accelerator: Accelerator) -> None:
    """With a tensor that is alive."""
    with _calm(accelerator):
        block = _block(accelerator)
        reserved = _figure(accelerator, "memory_reserved")
        expect(reserved >= _BLOCK, f"memory_reserved() of at least the {_BLOCK} bytes of a tensor", reserved)
        if _has_method(accelerator, "memory_allocated"):
            allocated = accelerator.memory_allocated()
            expect(reserved >= allocated - _NOISE, f"memory_reserved() of at least {allocated} allocated", reserved)
        del block


@check("memory", "empty_cache")
def check_empty_cache_keeps_what_is_in_use(accelerator: Accelerator) -> None:
    """Tensors keep their contents; cached memory does not grow."""
    tensor = torch.arange(1000, device=accelerator.current_device_name())
    expected = tensor.sum().item()
    reserved = accelerator.memory_reserved() if _has_method(accelerator, "memory_reserved") else None
    expect_none("empty_cache()", accelerator.empty_cache)
    expect_equal("after empty_cache(), the sum of a tensor", tensor.sum().item(), expected)
    if reserved is not None:
        now = accelerator.memory_reserved()
        expect(now <= reserved + _NOISE, f"memory_reserved() of at most {reserved} after empty_cache()", now)


@check("memory", "max_memory_allocated", "reset_peak_memory_stats")
def check_the_peak_rises_and_is_reset(accelerator: Accelerator) -> None:
    """It stays when the tensor goes, and falls with a reset."""
    _expect_peak(accelerator, accelerator.reset_peak_memory_stats, "reset_peak_memory_stats")


@check("memory", "reset_max_memory_allocated", "reset_max_memory_cached")
def check_the_deprecated_resets_start_a_new_peak(accelerator: Accelerator) -> None:
    """As reset_peak_memory_stats does."""
    for name in ("reset_max_memory_allocated", "reset_max_memory_cached"):
        _expect_peak(accelerator, getattr(accelerator, name), name)


def _expect_peak(accelerator: Accelerator, reset: Callable[[], object], name: str) -> None:
    with _calm(accelerator):
        expect_none(f"{name}()", reset)
        before = _figure(accelerator, "max_memory_allocated")
        block = _block(accelerator)
        # Asked while the tensor is there: a kernel may refuse to lower its own mark.
        _expect_growth(f"after {name}(), max_memory_allocated()", _figure(accelerator, "max_memory_allocated") - before)
        del block
        accelerator.synchronize()
        accelerator.empty_cache()
        kept = _figure(accelerator, "max_memory_allocated") - before
        expect(kept >= _BLOCK - _NOISE, "max_memory_allocated() to stay when the tensor goes", f"{kept} bytes more")
        reset()
        left = _figure(accelerator, "max_memory_allocated") - before
        expect(left <= _NOISE, f"max_memory_allocated() to fall with {name}()", f"{left} bytes more than before")


@check("memory", "max_memory_reserved")
def check_the_peak_of_reserved_memory_is_at_least_what_is_reserved(accelerator: Accelerator) -> None:
    """With a tensor that is alive."""
    with _calm(accelerator):
        block = _block(accelerator)
        peak = _figure(accelerator, "max_memory_reserved")
        least = accelerator.memory_reserved() if _has_method(accelerator, "memory_reserved") else _BLOCK
        expect(peak >= max(_BLOCK, least - _NOISE), f"max_memory_reserved() of at least {max(_BLOCK, least)}", peak)
        del block


@check("memory", "memory_cached", "max_memory_cached")
def check_the_deprecated_names_return_the_same(accelerator: Accelerator) -> None:
    """cached is the old word for reserved."""
    for old, new in (("memory_cached", "memory_reserved"), ("max_memory_cached", "max_memory_reserved")):
        expect_close(f"{old}()", _figure(accelerator, old), f"{new}()", getattr(accelerator, new)())


@check("memory", "memory_stats")
def check_memory_stats_are_numbers_by_name(accelerator: Accelerator) -> None:
    """Where they have torch's name for the allocated bytes, they agree with memory_allocated()."""
    for where in ((), (accelerator.current_device(),)):
        stats = accelerator.memory_stats(*where)
        expect_type("memory_stats()", stats, dict)
        expect(stats, "memory_stats() with an entry", stats)
        expect(all(isinstance(name, str) for name in stats), "memory_stats() with names as keys", list(stats))
        allocated = stats.get("allocated_bytes.all.current")
        if allocated is not None:
            expect_type("allocated_bytes.all.current", allocated, int)
            expect_close("allocated_bytes.all.current", allocated, "memory_allocated()", accelerator.memory_allocated())


@check("memory", "total_memory")
def check_total_memory_holds_what_is_in_use(accelerator: Accelerator) -> None:
    """And does not change."""
    total = accelerator.total_memory()
    expect_type("total_memory()", total, int)
    expect(total >= _BLOCK, f"total_memory() of at least {_BLOCK} bytes", total)
    expect_equal("total_memory(index)", accelerator.total_memory(accelerator.current_device()), total)
    if _has_method(accelerator, "memory_allocated"):
        allocated = accelerator.memory_allocated()
        expect(total >= allocated, f"total_memory() of at least {allocated} bytes that are allocated", total)


@check("memory", "device_properties")
def check_device_properties_have_a_name(accelerator: Accelerator) -> None:
    """And the memory that total_memory() tells."""
    properties = accelerator.device_properties()
    expect_type("device_properties().name", properties.name, str)
    expect(bool(properties.name), "a name of the device", properties.name)
    expect_equal("device_properties().total_memory", properties.total_memory, accelerator.total_memory())


@check("memory", "device_capability")
def check_the_capability_is_two_numbers(accelerator: Accelerator) -> None:
    """(0, 0) where the device has none."""
    capability = accelerator.device_capability()
    expect_type("device_capability()", capability, tuple)
    expect_equal("the types in device_capability()", [type(each) for each in capability], [int, int])


@check("memory", "mem_get_info")
def check_free_memory_comes_with_the_size(accelerator: Accelerator) -> None:
    """Free memory first, and no more than there is."""
    free, total = accelerator.mem_get_info()
    expect_type("mem_get_info()[0]", free, int)
    expect(0 <= free <= total, f"mem_get_info() with at most {total} bytes free", free)


@check("memory", "memory_summary")
def check_the_summary_is_text(accelerator: Accelerator) -> None:
    """For people to read."""
    summary = accelerator.memory_summary()
    expect_type("memory_summary()", summary, str)
    expect(bool(summary), "a text from memory_summary()", summary)


@check("memory", "available_memory")
def check_available_memory_shrinks_with_a_tensor(accelerator: Accelerator) -> None:
    """By its size in bytes, for one of several tensors.

    Other processes take and give back memory too; and a kernel keeps pages that were freed at hand for each CPU, a GiB
    and more of them, and counts them as used: the first tensors may come out of these.
    """
    available = accelerator.available_memory()
    expect_type("available_memory()", available, int)
    expect_type("available_memory(index)", accelerator.available_memory(accelerator.current_device()), int)
    if _has_method(accelerator, "total_memory"):
        total = accelerator.total_memory()
        expect(0 <= available <= total, f"available_memory() from 0 to total_memory(), {total} bytes", available)
    count = min(_MOST_BLOCKS, available // 4 // _BLOCK)
    if not count:
        raise UncheckedError(f"only {available} bytes are available, too few to allocate {_BLOCK} and see the change")
    shrunk: list[int] = []
    blocks: list[torch.Tensor] = []
    with _calm(accelerator):
        for _ in range(count):
            before = accelerator.available_memory()
            blocks.append(_block(accelerator))
            shrunk.append(before - accelerator.available_memory())
            if _BLOCK - 2 * _NOISE <= shrunk[-1] <= _BLOCK + 2 * _NOISE:
                return
    raise ConformanceError(f"expected available_memory() to shrink by about {_BLOCK} bytes a tensor, got {shrunk}")


def _has_method(accelerator: Accelerator, method: str) -> bool:
    return accelerator.has(CAPABILITY_OF[method]) and not accelerator.spec.capabilities.why_absent(method)
