# SPDX-License-Identifier: Apache-2.0
"""deepspeed.runtime.utils: how much memory is used."""

from __future__ import annotations

import gc
import sys

import torch.distributed as dist

from anyaccel import host_memory
from anyaccel.accelerator import get_accelerator
from anyaccel.accelerator.spec import Capability

from .._cover import cover

__all__ = ["see_memory_usage"]

_GB = 1 << 30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the memory of the accelerator and of the host, on rank 0, and begin a new peak; only with `force`."""
    if not force or (dist.is_available() and dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()  # what only waits for that is not counted
    device = get_accelerator()
    reserved, most_reserved = (
        (device.memory_reserved(), device.max_memory_reserved())
        if device.has(Capability.RESERVED_MEMORY)
        else (device.memory_allocated(), device.max_memory_allocated())
    )
    used, total = host_memory.total() - host_memory.available(), host_memory.total()
    lines = [
        message,
        f"MA {device.memory_allocated() / _GB:.2f} GB         Max_MA {device.max_memory_allocated() / _GB:.2f} GB"
        f"         CA {reserved / _GB:.2f} GB         Max_CA {most_reserved / _GB:.0f} GB ",
        f"CPU Virtual Memory:  used = {used / _GB:.2f} GB, percent = {100 * used / total:.1f}%",
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    device.reset_peak_memory_stats()


cover(globals())
