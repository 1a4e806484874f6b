# SPDX-License-Identifier: Apache-2.0
"""The CPU as an accelerator. One NUMA node is one device; its memory is the resident set of this process.

Longer than the others, since there is no torch module to forward to.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from typing import Any, ClassVar

import torch

from anyaccel import host_memory
from anyaccel.accelerator import synchronous
from anyaccel.accelerator.base import Accelerator, DeviceIndex
from anyaccel.accelerator.spec import (
    BackendSpec,
    Capabilities,
    Capability,
    CollectiveBackend,
    Unavailable,
    WithoutTorch,
)
from anyaccel.errors import UsageError
from anyaccel.numerals import parse_integer

_STREAM = synchronous.Stream(torch.device("cpu"))  # every stream of the CPU is this one queue


@functools.cache
def _numa_nodes() -> int:
    from anyaccel.topology.sysfs import read_machine  # not needed in a launched job, and takes 8 ms to load

    return len(read_machine().nodes_with_cores())


def _launch_number(name: str, default: int, minimum: int) -> int:
    """A number that the launcher has put into the environment."""
    text = os.environ.get(name)
    if not text:
        return default
    with contextlib.suppress(ValueError):
        if (number := parse_integer(text)) >= minimum:
            return number
    raise UsageError(f"{name}={text!r}: must be a number from {minimum}; the launcher sets it, else unset it")


class CpuAccelerator(Accelerator):
    """The host processor.

    Operations are complete when they return, so streams, events and graphs are objects with nothing to do (an
    event still measures time). Device indices are accepted everywhere and mean nothing: a process has one CPU
    device, the cores it is bound to.
    """

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="cpu",
        device_type="cpu",
        torch_module="torch.cpu",
        order=1000,
        why="every machine has one, so it is what is left when nothing else is there",
        collectives=(
            # oneCCL through our own op, then through Intel's bindings, which are at the end of their life.
            CollectiveBackend("ccl", "anyaccel.comm.ccl", why_not="anyaccel.ops.builders.ccl:why_not"),
            CollectiveBackend("ccl", "oneccl_bindings_for_pytorch"),
            CollectiveBackend("gloo"),
        ),
        visible_devices=(),  # a process is bound to cores by its CPU set, no variable narrows them
        export_prefixes=("CCL", "GLOO"),
        op_builders="anyaccel.ops.builders.cpu",
        capabilities=Capabilities(
            synchronous=True,
            absent={
                Capability.STREAMS: "operations on a CPU are complete when they return",
                Capability.EVENTS: "operations on a CPU are complete when they return; its events measure time only",
                Capability.GRAPHS: "captured work runs at once, and a replay does nothing",
                Capability.PINNED_MEMORY: "tensors are in host memory already, no device copies from it",
                Capability.HOST_REGISTRATION: "there is no device to register host memory with",
            },
        ),
        without_torch=WithoutTorch(place=1000),
    )

    @classmethod
    def probe(cls) -> Unavailable | None:
        return None

    # Identity -----------------------------------------------------------------------------------------------

    def device_name(self, device_index: DeviceIndex = None) -> str:
        self._named_index(device_index)
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def set_device(self, device_index: DeviceIndex) -> None:
        """Nothing to do: which cores a process uses was decided when it was bound."""

    def current_device(self) -> int:
        """LOCAL_RANK, else 0."""
        return _launch_number("LOCAL_RANK", default=0, minimum=0)

    def device_count(self) -> int:
        """LOCAL_SIZE (workers on this machine) in a launched job, else the NUMA nodes with allowed cores."""
        return _launch_number("LOCAL_SIZE", default=0, minimum=1) or _numa_nodes()

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Nothing to wait for."""

    def is_available(self) -> bool:
        return True

    # Streams ------------------------------------------------------------------------------------------------

    def current_stream(self, device_index: DeviceIndex = None) -> synchronous.Stream:
        return _STREAM

    def default_stream(self, device_index: DeviceIndex = None) -> synchronous.Stream:
        return _STREAM

    # Random numbers -----------------------------------------------------------------------------------------

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        return torch.default_generator

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # the CPU generator, and those of other devices as torch's users expect

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    # Memory -------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give the free pages of this process's heap back to the system; the resident set shrinks by them."""
        host_memory.release_free_memory()

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Resident set of this process in bytes."""
        return host_memory.RESIDENT_SET.current()

    def get_rss(self) -> int:
        """Resident set of this process in bytes, under the name that DeepSpeed's CPU accelerator has for it."""
        return self.memory_allocated()

    def reset_rss(self) -> int:
        """Start a new peak and return the resident set, as DeepSpeed's CPU accelerator does."""
        self.reset_peak_memory_stats()
        return self.memory_allocated()

    @property
    def max_mem(self) -> int:
        """The peak of the resident set in bytes, under DeepSpeed's name."""
        return self.max_memory_allocated()

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Highest resident set since the process began or the last reset, in bytes; see ResidentSet."""
        return host_memory.RESIDENT_SET.peak()

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        host_memory.RESIDENT_SET.reset_peak()

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        """Resident set and its peak under the names of `torch.cuda.memory_stats`, in bytes."""
        current, peak = host_memory.RESIDENT_SET.current(), host_memory.RESIDENT_SET.peak()
        return {
            f"{kind}_bytes.all.{name}": value
            for kind in ("allocated", "reserved")
            for name, value in (("current", current), ("peak", peak))
        }

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Memory of the host or the lowest cgroup limit below that, in bytes; may be a second old."""
        return host_memory.total()

    def _device_title(self, device_index: DeviceIndex) -> str:
        from anyaccel.topology.memory import cpu_model

        return cpu_model("") or platform.machine()

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Bytes that can be allocated now, on the host and within every enclosing cgroup."""
        return host_memory.available()

    # Data types ---------------------------------------------------------------------------------------------

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return True  # torch computes it on every CPU, natively or through float32

    def is_fp16_supported(self) -> bool:
        """Whether oneDNN has fp16 kernels for this CPU; without them torch computes fp16 very slowly."""
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
