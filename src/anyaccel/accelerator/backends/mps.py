# SPDX-License-Identifier: Apache-2.0
"""Apple GPUs, through torch.mps: one device with one queue, in which all work runs in the order it was given.

Longer than the others, since torch.mps shares few function names with them and has no streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from anyaccel.accelerator import synchronous
from anyaccel.accelerator.base import Accelerator, DeviceIndex
from anyaccel.accelerator.spec import BackendSpec, Capabilities, Capability, CollectiveBackend, WithoutTorch
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator


class Queue(synchronous.Stream):
    """The one queue as a stream: waiting for other streams is needless, waiting for the work is not."""

    def synchronize(self) -> None:
        """Wait for all work."""
        torch.mps.synchronize()

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, and return it."""
        event = MpsEvent() if event is None else event
        event.record()
        return event

    def query(self) -> bool:
        """Whether the work is done; torch.mps cannot tell without waiting for it."""
        torch.mps.synchronize()
        return True


class MpsEvent(synchronous.Event):
    """torch.mps.Event with the arguments that those of other devices take: its own record() takes no stream."""

    def __init__(self, enable_timing: bool = False, **_unused: Any) -> None:
        self._event = torch.mps.Event(enable_timing)

    def record(self, stream: Any = None) -> None:
        self._event.record()

    def query(self) -> bool:
        return bool(self._event.query())

    def wait(self, stream: Any = None) -> None:
        self._event.wait()

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end_event: Any) -> float:
        return float(self._event.elapsed_time(end_event._event))


class MpsAccelerator(TorchDeviceAccelerator):
    """torch.mps."""

    spec: ClassVar[BackendSpec] = BackendSpec(
        name="mps",
        device_type="mps",
        torch_module="torch.mps",
        install="use a Mac with Apple silicon and torch from PyPI",
        order=60,
        why="a part of torch, on machines where no other of its devices exists",
        collectives=(CollectiveBackend("gloo"),),
        op_builders="anyaccel.ops.builders.host",
        capabilities=Capabilities(
            absent={
                Capability.STREAMS: "torch runs all work of the GPU in one queue",
                Capability.GRAPHS: "torch.mps captures no graphs",
                Capability.PEAK_MEMORY: "torch.mps keeps no peak: the figure is what the driver holds now",
                Capability.PINNED_MEMORY: "host and GPU share their memory",
                Capability.HOST_REGISTRATION: "host and GPU share their memory",
                Capability.FP64: "Metal has no float64",
            }
        ),
        without_torch=WithoutTorch(place=90),
    )

    _BUILD = "torch.mps of a build of torch for macOS"

    @classmethod
    def _is_built(cls) -> bool:
        return bool(torch.backends.mps.is_built())

    def resolves_data_dependency(self) -> bool:
        return True  # one queue

    # Identity: there is one device, and torch.mps has no function to choose it.

    def set_device(self, device_index: DeviceIndex) -> None:
        return

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        self._vendor("synchronize")()

    # Random numbers: without indices.

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        generator: torch.Generator = self._vendor("_get_default_mps_generator")()
        return generator

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        self._vendor("set_rng_state")(new_state)

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        state: torch.Tensor = self._vendor("get_rng_state")()
        return state

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    initial_seed = (
        Accelerator.initial_seed
    )  # of the base class, which asks the generator: torch.mps has no such function

    # Streams: code with streams runs unchanged, its streams all being the one queue.

    @property
    def Stream(self) -> Any:
        return Queue

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def current_stream(self, device_index: DeviceIndex = None) -> Any:
        return Queue(self.device())

    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        return Queue(self.device())

    @property
    def Event(self) -> Any:
        return MpsEvent

    # Memory, in the words of torch.mps.

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("current_allocated_memory")())

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("driver_allocated_memory")())

    # No peak is kept, so has() says that there is none; programs that print one get what the driver holds for this
    # process, cached blocks as well, which is what DeepSpeed's Metal accelerator gives.

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        return self.memory_reserved()

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        return self.memory_reserved()

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        return  # there is none to reset

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "reserved_bytes.all.current": self.memory_reserved(),
        }

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("recommended_max_memory")())

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        return max(0, self.total_memory() - self.memory_reserved())

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))  # the first with bfloat16 in Metal

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()  # torch.mps needs no initialisation
