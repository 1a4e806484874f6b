# SPDX-License-Identifier: Apache-2.0
"""The shared implementation for every device that comes with a torch device module (torch.cuda and its like).

Each method forwards to the function of that module which has the same meaning. A function that the installed
version of the module does not have is a CapabilityError, not an AttributeError: modules differ between
vendors and between versions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from anyaccel.accelerator.base import Accelerator, DeviceIndex
from anyaccel.accelerator.spec import Capability, Unavailable


def find_module(name: str) -> Any:
    """The object of this dotted name, such as ``torch.npu``.

    Attributes are tried before imports, since vendors set their module as an attribute of torch.

    Raises:
        ImportError: there is none.
    """
    first, *rest = name.split(".")
    found: Any = importlib.import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


class TorchDeviceAccelerator(Accelerator):
    """An accelerator that `spec.torch_module` drives."""

    def __init__(self) -> None:
        super().__init__()
        self._module = find_module(self.spec.torch_module)

    @classmethod
    def probe(cls) -> Unavailable | None:
        missing = cls._probe_package()
        # device_count() and not is_available(): on cuda the latter initialises the driver, after which a
        # forked child cannot use the device any more.
        return missing or cls._probe_count(lambda: int(find_module(cls.spec.torch_module).device_count()))

    def _vendor(self, name: str) -> Any:
        found = getattr(self._module, name, None)
        if found is None:
            self._lacks(name, f"{self.spec.torch_module} of torch {torch.__version__} does not have it")
        return found

    def _provides(self, capability: Capability) -> bool:
        if capability is Capability.GRAPHS and not self.spec.graph_class:
            return False
        return super()._provides(capability)

    # Identity -----------------------------------------------------------------------------------------------

    def set_device(self, device_index: DeviceIndex) -> None:
        self._vendor("set_device")(device_index)

    def current_device(self) -> int:
        return int(self._vendor("current_device")())

    def device_count(self) -> int:
        return int(self._vendor("device_count")())

    def synchronize(self, device_index: DeviceIndex = None) -> None:
        self._vendor("synchronize")(device_index)

    def is_available(self) -> bool:
        return bool(self._vendor("is_available")())

    # Random numbers -----------------------------------------------------------------------------------------

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        index = self._index(device_index)
        if index >= len(self._vendor("default_generators")):  # empty until the device is initialised
            self._vendor("init")()
        generator: torch.Generator = self._vendor("default_generators")[index]
        return generator

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        self._vendor("set_rng_state")(new_state, self._index(device_index))

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        state: torch.Tensor = self._vendor("get_rng_state")(self._index(device_index))
        return state

    def manual_seed(self, seed: int) -> None:
        self._vendor("manual_seed")(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._vendor("manual_seed_all")(seed)

    def initial_seed(self) -> int:
        return int(self._vendor("initial_seed")())

    # Streams and events -------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return self._vendor("Stream") if self.has(Capability.STREAMS) else super().Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        if not self.has(Capability.STREAMS):
            return super().stream(stream)
        context: AbstractContextManager[Any] = self._vendor("stream")(stream)
        return context

    def current_stream(self, device_index: DeviceIndex = None) -> Any:
        if not self.has(Capability.STREAMS):
            return super().current_stream(device_index)
        return self._vendor("current_stream")(device_index)

    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        if not self.has(Capability.STREAMS):
            return super().default_stream(device_index)
        return self._vendor("default_stream")(device_index)

    @property
    def Event(self) -> Any:
        return self._vendor("Event")

    # Memory -------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        self._vendor("empty_cache")()

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("memory_allocated")(device_index))

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("max_memory_allocated")(device_index))

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("memory_reserved")(device_index))

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("max_memory_reserved")(device_index))

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        return dict(self._vendor("memory_stats")(device_index))

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        # reset_max_memory_allocated and reset_max_memory_cached of torch.cuda are deprecated names of this
        # one, and torch.xpu has only this one; the base class sends both here.
        self._vendor("reset_peak_memory_stats")(device_index)

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        return int(self._vendor("get_device_properties")(device_index).total_memory)

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        # The driver's figure: it counts what other processes hold, and this process's cached blocks as used.
        free, _total = self._vendor("mem_get_info")(device_index)
        return int(free)

    # Data types and lazy calls ------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return bool(self._vendor("is_bf16_supported")())

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        self._vendor("_lazy_call")(callback)

    # Graphs -------------------------------------------------------------------------------------------------

    def create_graph(self) -> Any:
        if not self.has(Capability.GRAPHS):
            return super().create_graph()
        return self._vendor(self.spec.graph_class)()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        if not self.has(Capability.GRAPHS):
            return super().capture_to_graph(graph, pool, stream)
        context: AbstractContextManager[Any] = self._vendor("graph")(graph, pool=pool, stream=stream)
        return context

    def is_current_stream_capturing(self) -> bool:
        return self.has(Capability.GRAPHS) and bool(self._vendor("is_current_stream_capturing")())
