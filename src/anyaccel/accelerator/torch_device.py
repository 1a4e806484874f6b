# SPDX-License-Identifier: Apache-2.0
"""The shared implementation for every device that comes with a torch device module (torch.cuda and its like).

Each method forwards to the function of that module which has the same meaning. A function that the installed
version of the module does not have is a CapabilityError, not an AttributeError: modules differ between
vendors and between versions.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch

from anyaccel.accelerator.base import Accelerator, DeviceIndex
from anyaccel.accelerator.spec import CAPABILITY_OF, Capability, Unavailable


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


def triton_drives(backend: str) -> bool:
    """Whether the installed Triton has a backend of this name, without importing it (which may open devices)."""
    triton = importlib.util.find_spec("triton")
    folders = triton.submodule_search_locations if triton is not None else None
    return any((Path(folder) / "backends" / backend).is_dir() for folder in folders or ())


class TorchDeviceAccelerator(Accelerator):
    """An accelerator that `spec.torch_module` drives."""

    def __init__(self) -> None:
        super().__init__()
        self._module = find_module(self.spec.torch_module)

    @classmethod
    def probe(cls) -> Unavailable | None:
        return cls._probe_package() or cls._probe_module()

    @classmethod
    def _probe_module(cls) -> Unavailable | None:
        if not cls._is_built():
            return Unavailable(f"{cls._title()} requires {cls._BUILD}, which {torch.__version__} is not", False)
        try:
            module = find_module(cls.spec.torch_module)
        except ImportError as error:
            return Unavailable(f"{cls._title()} requires {cls.spec.torch_module}: {error}", bool(cls.spec.package))
        # device_count() and not is_available(): on cuda the latter initialises the driver, after which a
        # forked child cannot use the device any more.
        return cls._probe_count(lambda: int(module.device_count()))

    # For a module that is a part of torch: which builds of torch drive its device, and whether this is one.
    _BUILD: ClassVar[str] = ""

    @classmethod
    def _is_built(cls) -> bool:
        return True

    def _vendor(self, function: str, method: str = "") -> Any:
        """The module's function of this name.

        Args:
            method: what it is needed for, where that has another name; CapabilityError tells this name.
        """
        found = getattr(self._module, function, None)
        absent = self.spec.capabilities.absent
        if found is None or absent:
            method = method or function
            for name in (method, CAPABILITY_OF.get(method, "")):
                if name in absent:
                    self._lacks(name)
            if found is None:
                self._lacks(method, f"{self.spec.torch_module} does not have {function}")
        return found

    def _provides(self, capability: Capability) -> bool:
        if capability is Capability.GRAPHS and not self.spec.graph_class:
            return False
        if capability is Capability.HOST_REGISTRATION and self.spec.host_registration is None:
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
        if index >= len(getattr(self._module, "default_generators", ())):
            # Empty, or not even there, until the device is initialised, which every vendor's RNG functions do.
            self.get_rng_state(index)
        generator: torch.Generator = self._vendor("default_generators", "default_generator")[index]
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
        return self._vendor("Event") if self.has(Capability.EVENTS) else super().Event

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
        # By position and with an index: vendors name the argument differently, and some require it.
        return int(self._vendor("get_device_properties", "total_memory")(self._index(device_index)).total_memory)

    def _device_title(self, device_index: DeviceIndex) -> str:
        asked = getattr(self._module, "get_device_name", None)
        return self.spec.name if asked is None else str(asked(self._index(device_index)))

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        # The driver's figure: it counts what other processes hold, and this process's cached blocks as used.
        free, _total = self._vendor("mem_get_info", "available_memory")(device_index)
        return int(free)

    # Data types, lazy calls, profiling, Triton --------------------------------------------------------------

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        return bool(self._vendor("is_bf16_supported")())

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        self._vendor("_lazy_call", "lazy_call")(callback)

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a range of the vendor's profiler, or of `torch.profiler`; no vendor has domains and categories."""
        if self.spec.range_module:
            self._vendor(self.spec.range_module, "range_push").range_push(msg)
        else:
            super().range_push(msg, domain, category)

    def range_pop(self, domain: str | None = None) -> None:
        if self.spec.range_module:
            self._vendor(self.spec.range_module, "range_pop").range_pop()
        else:
            super().range_pop(domain)

    def is_triton_supported(self) -> bool:
        return bool(self.spec.triton_backend) and triton_drives(self.spec.triton_backend)

    # Graphs -------------------------------------------------------------------------------------------------

    def create_graph(self) -> Any:
        if not self.has(Capability.GRAPHS):
            return super().create_graph()
        return self._vendor(self.spec.graph_class, "create_graph")()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        if not self.has(Capability.GRAPHS):
            return super().capture_to_graph(graph, pool, stream)
        capture = self._vendor("graph", "capture_to_graph")
        context: AbstractContextManager[Any] = capture(graph, pool=pool, stream=stream)
        return context

    def is_current_stream_capturing(self) -> bool:
        return self.has(Capability.GRAPHS) and bool(self._vendor("is_current_stream_capturing")())

    # Host memory --------------------------------------------------------------------------------------------

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        how = self.spec.host_registration
        if how is None:
            return super().register_host_memory(address, num_bytes)
        register = getattr(self._vendor(how.runtime, "register_host_memory")(), how.register)
        self._check_runtime(how.register, int(register(address, num_bytes, how.flags)))
        return True

    def unregister_host_memory(self, address: int) -> None:
        how = self.spec.host_registration
        if how is None:
            return super().unregister_host_memory(address)
        unregister = getattr(self._vendor(how.runtime, "register_host_memory")(), how.unregister)
        return self._check_runtime(how.unregister, int(unregister(address)))

    def _check_runtime(self, function: str, code: int) -> None:
        check = getattr(self._module, "check_error", None)
        if check is not None:
            check(code)  # raises with the runtime's own words
        elif code:
            raise RuntimeError(f"{function} of the {self._name} runtime failed with error {code}")
