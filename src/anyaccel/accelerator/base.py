# SPDX-License-Identifier: Apache-2.0
"""The accelerator interface: every method, with a default wherever there is a sensible one.

A new backend must bring `spec`, `device_count`, `current_device`, `set_device` and `synchronize`; whatever
else it leaves out either works through the default or raises CapabilityError. A method that is added here
later comes with a default too, so an extension written for an older version keeps working.

The file is long because the interface is: 91 methods whose names, arguments and defaults are DeepSpeed's,
and a few more.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NoReturn, Self

import torch

from anyaccel import env
from anyaccel.accelerator import synchronous
from anyaccel.accelerator.spec import METHODS_OF, BackendSpec, Capability, Unavailable
from anyaccel.errors import CapabilityError, UsageError

logger = logging.getLogger(__name__)

# What torch's device modules take; an int is an index.
DeviceIndex = int | str | torch.device | None

HOST = torch.device("cpu")
_PORTED = "cuda"  # in code that was written for CUDA, a device of the accelerator


@dataclass(frozen=True)
class DeviceProperties:
    """What `Accelerator.device_properties` says.

    Attributes:
        name: what the maker calls the device.
        total_memory: bytes that this process may use at most.
        major, minor: compute capability; (0, 0), less than any GPU's, where that is CUDA's notion.
    """

    name: str
    total_memory: int
    major: int = 0
    minor: int = 0


# Methods of a capability whose defaults below work as soon as the others of that capability are overridden.
_DERIVED = {
    "default_stream",
    "get_rng_state",
    "set_rng_state",
    "manual_seed",
    "manual_seed_all",
    "initial_seed",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "memory_cached",
    "max_memory_reserved",
    "max_memory_cached",
    "device_properties",
    "device_capability",
    "mem_get_info",
    "memory_summary",
    "get_rng_state_all",
    "set_rng_state_all",
}


# What the classes of tensors of a dtype are called.
_TYPE_NAMES = {
    torch.bfloat16: "BFloat16Tensor",
    torch.uint8: "ByteTensor",
    torch.float64: "DoubleTensor",
    torch.float32: "FloatTensor",
    torch.float16: "HalfTensor",
    torch.int32: "IntTensor",
    torch.int64: "LongTensor",
}


class TypedTensor(str):
    """Makes tensors of one dtype on one device, as torch's legacy `torch.FloatTensor` does.

    Called with ints it allocates that shape without filling it; called with a sequence it copies the values. As text it
    is the name of that class, which is what `Tensor.type()` takes and gives.
    """

    __slots__ = ("device", "dtype")

    def __new__(cls, dtype: torch.dtype, device: str) -> Self:
        kind = torch.device(device).type
        return super().__new__(cls, f"torch.{'' if kind == HOST.type else f'{kind}.'}{_TYPE_NAMES[dtype]}")

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device

    def __reduce__(self) -> tuple[type[Self], tuple[torch.dtype, str]]:
        return type(self), (self.dtype, self.device)

    def __call__(self, *args: Any) -> torch.Tensor:
        if all(isinstance(size, int) for size in args):
            return torch.empty(args or (0,), dtype=self.dtype, device=self.device)
        if len(args) == 1 and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=self.dtype, device=self.device)
        (values,) = args
        if isinstance(values, torch.Tensor):
            return values.to(self.device, self.dtype, copy=True)
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and (value.dtype, value.device.type) == (
            self.dtype,
            torch.device(self.device).type,
        )


class Accelerator(abc.ABC):
    """A device that tensors live on and work runs on.

    `device_index` arguments are an index, a device or None for the current device. Memory is in bytes.
    Attributes beside the methods: `spec` (BackendSpec), `_name`, `_communication_backend_name`.
    """

    spec: ClassVar[BackendSpec]
    # Whether range_push() does something with its `domain`; code for DeepSpeed asks.
    supports_nvtx_domain: ClassVar[bool] = False

    def __init__(self) -> None:
        self._name = self.spec.name
        self._communication_backend_name = self._first_collective()
        self._compile_backend = self.spec.compile_backend
        self._ranges = threading.local()
        self._capabilities = frozenset(filter(self._provides, Capability))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"

    # A module that keeps its accelerator is copied and sent to other processes: each has one accelerator.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[[], Accelerator], tuple[()]]:
        # Detection imports this module. Its package is imported before both.
        return sys.modules["anyaccel.accelerator"].get_accelerator, ()

    # Detection ----------------------------------------------------------------------------------------------

    @classmethod
    def probe(cls) -> Unavailable | None:
        """None when the device is there, else why not. Must not create a device context."""
        return cls._probe_package() or cls._probe_count(lambda: cls().device_count())

    @classmethod
    def _probe_package(cls) -> Unavailable | None:
        package = cls.spec.package
        if not package:
            return None
        try:
            importlib.import_module(package)
        except (Exception, SystemExit) as error:  # a vendor package may raise anything at import
            logger.debug("import of %s failed", package, exc_info=True)
            if isinstance(error, ModuleNotFoundError) and f"{package}.".startswith(f"{error.name}."):
                missing = f"{cls._title()} requires {package}, which is not installed on this system"
                return Unavailable(missing, installed=False)
            raised = f"whose import raised {type(error).__name__}: {error}"
            return Unavailable(f"{cls._title()} requires {package}, {raised}", installed=True)
        return None

    @classmethod
    def _probe_count(cls, count: Callable[[], int]) -> Unavailable | None:
        if count() > 0:
            return None
        return Unavailable(f"{cls.spec.torch_module} is there but sees no device", installed=True)

    @classmethod
    def _title(cls) -> str:
        """The accelerator's name in messages, as DeepSpeed's documents have it."""
        return f"{cls.spec.name.upper()}_Accelerator"

    # Capabilities -------------------------------------------------------------------------------------------

    def has(self, capability: Capability | str) -> bool:
        """Whether the device has `capability`; ask this rather than compare device names.

        It lacks what `spec.capabilities` declares absent, and what the backend does not implement.

        Raises:
            ValueError: no capability of that name.
        """
        return Capability(capability) in self._capabilities

    def _provides(self, capability: Capability) -> bool:
        if capability in self.spec.capabilities.absent:
            return False
        if capability is Capability.OP_BUILDERS:
            return bool(self.spec.op_builders)
        if capability is Capability.COLLECTIVES:
            return bool(self.spec.collectives)
        if capability is Capability.RESERVED_MEMORY and not self._overrides("memory_reserved"):
            return self._provides(Capability.MEMORY_STATS)  # what the default forwards to
        return all(self._overrides(name) for name in METHODS_OF.get(capability, ()) if name not in _DERIVED)

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Accelerator, method)

    def _lacks(self, capability: str, why: str = "") -> NoReturn:
        """Raise CapabilityError for a capability that the device lacks."""
        why = self.spec.capabilities.why_absent(capability) or why or "this backend does not provide it"
        raise CapabilityError(self._name, str(capability), why)

    def _check_stand_in(self, capability: Capability) -> None:
        if not self.spec.capabilities.synchronous:
            self._lacks(capability)

    def is_synchronized_device(self) -> bool:
        """True when every operation is complete as its call returns."""
        return self.spec.capabilities.synchronous

    def use_host_timers(self) -> bool:
        """True when time is to be taken by the host's clock instead of device events."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """True when the device orders operations on the same data by itself, without stream waits."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """True when the device throttles by itself when its memory runs short."""
        return self.is_synchronized_device()

    # Identity -----------------------------------------------------------------------------------------------

    def device_name(self, device_index: DeviceIndex = None) -> str:
        """`"cuda"`, or `"cuda:1"` for an index: what `torch.device()` takes.

        Args:
            device_index: also the name or the torch.device of a device of this accelerator or of CUDA, whose index
                counts: what `.cuda()` of a tensor takes.

        Raises:
            UsageError: it is a device of another kind.
        """
        index = self._named_index(device_index)
        return self.spec.device_type if index is None else f"{self.spec.device_type}:{index}"

    def _named_index(self, device: DeviceIndex) -> int | None:
        if device is None or isinstance(device, int):
            return device
        if isinstance(device, str) and device.isdecimal():
            return int(device)
        found = torch.device(device)
        if found.type not in (self.spec.device_type, _PORTED):
            raise UsageError(
                f"device {str(device)!r} is none of {self._title()}'s: give {self.spec.device_type!r} or an index"
            )
        return found.index

    def device(self, device_index: DeviceIndex = None) -> torch.device:
        """The `torch.device` of this index; `device_guard` makes it the current one."""
        return torch.device(self.device_name(device_index))

    @contextmanager
    def device_guard(self, device_index: DeviceIndex) -> Iterator[None]:
        """Make this the current device within the block, as `torch.cuda.device` does; None leaves it as it is."""
        index = self._named_index(device_index)
        before = self.current_device()
        if index is not None:
            self.set_device(index)
        try:
            yield
        finally:
            if index is not None:
                self.set_device(before)

    @abc.abstractmethod
    def set_device(self, device_index: DeviceIndex) -> None:
        """Make this the current device of the calling thread."""

    @abc.abstractmethod
    def current_device(self) -> int:
        """Index of the current device."""

    def current_device_name(self) -> str:
        """Name of the current device with its index, for `device=` arguments."""
        return self.device_name(self.current_device())

    @abc.abstractmethod
    def device_count(self) -> int:
        """Number of devices this process may use. Must not create a device context."""

    @abc.abstractmethod
    def synchronize(self, device_index: DeviceIndex = None) -> None:
        """Wait for all work on the device."""

    def is_available(self) -> bool:
        """Whether there is at least one device."""
        return self.device_count() > 0

    # Random numbers -----------------------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """The `torch.random` module."""
        return torch.random

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        """The generator of the device; works before the device is initialised."""
        self._lacks(Capability.RNG)

    def set_rng_state(self, new_state: torch.Tensor, device_index: DeviceIndex = None) -> None:
        """Set the generator's state to a uint8 CPU tensor that get_rng_state returned."""
        self.default_generator(self._index(device_index)).set_state(new_state)

    def get_rng_state(self, device_index: DeviceIndex = None) -> torch.Tensor:
        """State of the device's generator: a uint8 tensor on the CPU."""
        return self.default_generator(self._index(device_index)).get_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The states of all devices' generators."""
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        """Set the generators of the devices to states that get_rng_state_all returned."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.default_generator(self.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        for index in range(self.device_count()):
            self.default_generator(index).manual_seed(seed)

    def initial_seed(self) -> int:
        """Seed that the current device's generator started from."""
        return self.default_generator(self.current_device()).initial_seed()

    def _index(self, device_index: DeviceIndex) -> int:
        if isinstance(device_index, int):
            return device_index
        index = None if device_index is None else torch.device(device_index).index
        return self.current_device() if index is None else index

    # Streams and events -------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The stream class."""
        self._check_stand_in(Capability.STREAMS)
        return synchronous.Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which work goes to `stream`; None changes nothing."""
        self._check_stand_in(Capability.STREAMS)
        return contextlib.nullcontext(stream)

    def current_stream(self, device_index: DeviceIndex = None) -> Any:
        """The stream that work goes to now."""
        self._check_stand_in(Capability.STREAMS)
        return synchronous.Stream(self.device())

    def default_stream(self, device_index: DeviceIndex = None) -> Any:
        """The stream that work goes to when no other is chosen."""
        return self.current_stream(device_index)

    @property
    def Event(self) -> Any:
        """The event class; `elapsed_time` is in milliseconds."""
        self._check_stand_in(Capability.EVENTS)
        return synchronous.Event

    # Memory -------------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give cached, unused memory back to the device; nothing to do without a caching allocator."""
        return

    def memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Bytes that tensors hold now."""
        self._lacks(Capability.MEMORY_STATS)

    def max_memory_allocated(self, device_index: DeviceIndex = None) -> int:
        """Highest memory_allocated since the start or the last reset."""
        self._lacks(Capability.PEAK_MEMORY)

    def reset_max_memory_allocated(self, device_index: DeviceIndex = None) -> None:
        """Start a new peak; as in torch, the same as reset_peak_memory_stats."""
        self.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Bytes that the allocator holds, in use or cached."""
        return self.memory_allocated(device_index)

    def max_memory_reserved(self, device_index: DeviceIndex = None) -> int:
        """Highest memory_reserved since the start or the last reset."""
        return self.max_memory_allocated(device_index)

    def memory_cached(self, device_index: DeviceIndex = None) -> int:
        """The old name of memory_reserved."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: DeviceIndex = None) -> int:
        """The old name of max_memory_reserved."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: DeviceIndex = None) -> None:
        """Start a new peak; as in torch, the same as reset_peak_memory_stats."""
        self.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: DeviceIndex = None) -> dict[str, Any]:
        """The allocator's counters, under the names that `torch.cuda.memory_stats` uses."""
        self._lacks(Capability.MEMORY_STATS)

    def reset_peak_memory_stats(self, device_index: DeviceIndex = None) -> None:
        """Start a new peak for all max_ figures."""
        self._lacks(Capability.PEAK_MEMORY)

    def total_memory(self, device_index: DeviceIndex = None) -> int:
        """Bytes of memory of the device that this process may use at most."""
        self._lacks(Capability.MEMORY_SIZE)

    def device_properties(self, device_index: DeviceIndex = None) -> DeviceProperties:
        """What the device is called, and the memory that it has."""
        return DeviceProperties(self._device_title(device_index), self.total_memory(device_index))

    def device_capability(self, device_index: DeviceIndex = None) -> tuple[int, int]:
        """Compute capability of CUDA; (0, 0) elsewhere, so that programs take the way that needs nothing of CUDA."""
        known = self.device_properties(device_index)
        return known.major, known.minor

    def _device_title(self, device_index: DeviceIndex) -> str:
        """What the maker calls the device."""
        return self.spec.name

    def available_memory(self, device_index: DeviceIndex = None) -> int:
        """Bytes that are free now, other processes counted."""
        self._lacks(Capability.MEMORY_SIZE)

    def mem_get_info(self, device_index: DeviceIndex = None) -> tuple[int, int]:
        """available_memory and total_memory, in bytes."""
        return self.available_memory(device_index), self.total_memory(device_index)

    def memory_summary(self, device_index: DeviceIndex = None, abbreviated: bool = False) -> str:
        """The allocator's counters as text, one a line."""
        return "\n".join(f"{name:40} {value}" for name, value in sorted(self.memory_stats(device_index).items()))

    # Data types ---------------------------------------------------------------------------------------------

    def is_bf16_supported(self, including_emulation: bool = False) -> bool:
        """Whether torch.bfloat16 computes on the device.

        Args:
            including_emulation: also by way of float32, as `torch.cuda.is_bf16_supported()` counts.
        """
        return True

    def is_fp16_supported(self) -> bool:
        """Whether torch.float16 computes on the device."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether torch.float64 computes on the device."""
        return self.has(Capability.FP64)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating-point dtypes that compute on the device, float32 first."""
        optional = {
            torch.float16: self.is_fp16_supported(),
            torch.bfloat16: self.is_bf16_supported(),
            torch.float64: self.is_fp64_supported(),
        }
        return [torch.float32, *(dtype for dtype, supported in optional.items() if supported)]

    # Profiling, lazy calls, communication, Triton -----------------------------------------------------------

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range in the profile; here that of `torch.profiler`. Ranges nest within a thread."""
        mark = torch.autograd.profiler.record_function(msg)
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._open_ranges().append(mark)

    def range_pop(self, domain: str | None = None) -> None:
        """Close the range that this thread opened last; nothing happens when none is open."""
        if self._open_ranges():
            self._open_ranges().pop().__exit__(None, None, None)

    def _open_ranges(self) -> list[torch.autograd.profiler.record_function]:
        stack: list[torch.autograd.profiler.record_function] = self._ranges.__dict__.setdefault("open", [])
        return stack

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Call `callback` now, or as soon as the device is initialised."""
        callback()

    def communication_backend_name(self) -> str:
        """Name for `torch.distributed.init_process_group(backend=)`."""
        return self._communication_backend_name or self._lacks(Capability.COLLECTIVES)

    def _first_collective(self) -> str:
        for backend in self.spec.collectives:
            if not backend.package:
                return backend.name
            try:
                if backend.why_not:
                    module, _, function = backend.why_not.partition(":")
                    if reason := getattr(importlib.import_module(module), function)():
                        logger.debug("communication backend %r: %s", backend.name, reason)
                        continue
                importlib.import_module(backend.package)
            except ModuleNotFoundError:
                continue
            except (Exception, SystemExit) as error:  # a vendor package may raise anything at import
                problem = f"importing {backend.package} raised {type(error).__name__}: {error}"
                logger.warning("communication backend %r is passed over: %s", backend.name, problem)
                logger.debug("import of %s failed", backend.package, exc_info=True)
                continue
            return backend.name
        return ""

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run on the device."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Whether a grouped matmul in Triton is faster than torch's own."""
        return False

    # Graphs -------------------------------------------------------------------------------------------------

    def create_graph(self) -> Any:
        """A new, empty graph."""
        self._check_stand_in(Capability.GRAPHS)
        return synchronous.Graph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """Context in which work is captured into `graph` instead of being run."""
        self._check_stand_in(Capability.GRAPHS)
        return contextlib.nullcontext(graph)

    def replay_graph(self, graph: Any) -> None:
        """Run what `graph` has captured."""
        graph.replay()

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return False

    # Typed tensors ------------------------------------------------------------------------------------------

    @property
    def BFloat16Tensor(self) -> TypedTensor:
        """Makes torch.bfloat16 tensors on the device."""
        return TypedTensor(torch.bfloat16, self.device_name())

    @property
    def ByteTensor(self) -> TypedTensor:
        """Makes torch.uint8 tensors on the device."""
        return TypedTensor(torch.uint8, self.device_name())

    @property
    def DoubleTensor(self) -> TypedTensor:
        """Makes torch.float64 tensors on the device."""
        return TypedTensor(torch.float64, self.device_name())

    @property
    def FloatTensor(self) -> TypedTensor:
        """Makes torch.float32 tensors on the device."""
        return TypedTensor(torch.float32, self.device_name())

    @property
    def HalfTensor(self) -> TypedTensor:
        """Makes torch.float16 tensors on the device."""
        return TypedTensor(torch.float16, self.device_name())

    @property
    def IntTensor(self) -> TypedTensor:
        """Makes torch.int32 tensors on the device."""
        return TypedTensor(torch.int32, self.device_name())

    @property
    def LongTensor(self) -> TypedTensor:
        """Makes torch.int64 tensors on the device."""
        return TypedTensor(torch.int64, self.device_name())

    # Host memory --------------------------------------------------------------------------------------------

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> torch.Tensor:
        """A page-locked copy of a host tensor; the tensor itself where the device has no use for that.

        Args:
            tensor: on the host.
            make_copy: False gives new, unfilled memory instead of a copy.
            match_shape: False, with make_copy=False, gives a flat tensor of as many elements.
            align_bytes: 0 asks for page-aligned memory; only a backend with such an allocator heeds it. An
                int in the place of make_copy means this, as in the interface's older versions.
        """
        make_copy, _ = self._pin_arguments(make_copy, align_bytes)
        if (locked := self._locked_memory()) is not None:
            pinned: torch.Tensor = locked.pin(tensor, make_copy, match_shape)
            return pinned
        if not self.has(Capability.PINNED_MEMORY):
            return tensor
        if make_copy:
            return tensor.pin_memory()
        return self._empty_pinned(tuple(tensor.shape) if match_shape else (tensor.numel(),), tensor.dtype)

    def _pin_arguments(self, make_copy: Any, align_bytes: int) -> tuple[bool, int]:
        """make_copy and align_bytes, also when the older interface gave align_bytes by position."""
        return (make_copy, align_bytes) if isinstance(make_copy, bool) else (True, make_copy)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in page-locked host memory."""
        locked = self._locked_memory()
        return (locked is not None and bool(locked.is_pinned(tensor))) or tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> bool | None:
        """Give page-locked memory back early.

        Returns:
            Whether there was some, with DS_PIN_MEMORY_BACKEND=native. Else None: it goes with the tensor.
        """
        locked = self._locked_memory()
        return None if locked is None else bool(locked.unpin(tensor))

    def _locked_memory(self) -> Any:
        """The op that pins in the place of torch where DS_PIN_MEMORY_BACKEND says so, on every device; else None."""
        if env.DS_PIN_MEMORY_BACKEND.get() != "native":
            return None
        return self.create_op_builder("PinMemoryBuilder").load()

    def pin_memory_alignment(self) -> int:
        """Alignment in bytes that register_host_memory wants; 1 for none."""
        return 1

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
        """New, unfilled page-locked host memory; ordinary memory where the device has no use for that.

        Args:
            size: ints, or one sequence of ints.
            dtype: of the elements.
            device: accepted for symmetry with `torch.empty`; only the host makes sense.
        """
        self._require_host(device)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return self._empty_pinned(tuple(shape), dtype)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """pin_empty with the shape of `tensor` (any device) and, unless given, its dtype."""
        self._require_host(device)
        return self._empty_pinned(tuple(tensor.shape), tensor.dtype if dtype is None else dtype)

    def _empty_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if (locked := self._locked_memory()) is not None:
            pinned: torch.Tensor = locked.pin_empty(shape, dtype)
            return pinned
        return torch.empty(shape, dtype=dtype, pin_memory=self.has(Capability.PINNED_MEMORY))

    def _require_host(self, device: str | torch.device) -> None:
        if torch.device(device).type != HOST.type:
            raise UsageError(f"pinned memory is host memory, so device={str(device)!r} must be 'cpu'")

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Page-lock existing host memory for the device; raises the driver's error.

        Returns:
            Whether it is registered: False where no device has a use for that.
        """
        return False

    def unregister_host_memory(self, address: int) -> None:
        """Undo register_host_memory; nothing happens where that answers False."""
        return

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lives on a device of this accelerator."""
        device = getattr(tensor, "device", None) or tensor.data.device  # a PackedSequence has only data
        return bool(device.type == self.spec.device_type)

    # Ops ----------------------------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """Name of the package that holds the op builders of this accelerator.

        Raises:
            CapabilityError: it has none.
        """
        return self.spec.op_builders or self._lacks(Capability.OP_BUILDERS, self._no_op_builders())

    def get_op_builder(self, class_name: str) -> type[Any] | None:
        """The op builder class of this name, or None when there is none; create_op_builder says why."""
        if not self.spec.op_builders:
            return None
        found: type[Any] | None = getattr(importlib.import_module(self.spec.op_builders), class_name, None)
        return found

    def create_op_builder(self, class_name: str) -> Any:
        """A new op builder of this name.

        Raises:
            CapabilityError: there is none; the message names it and says why.
        """
        builder = self.get_op_builder(class_name)
        if builder is None:
            package = self.spec.op_builders
            why = f"package {package} does not define it" if package else self._no_op_builders()
            self._lacks(class_name, why)
        return builder()

    def _no_op_builders(self) -> str:
        return self.spec.capabilities.why_absent(Capability.OP_BUILDERS) or "this backend has no op builders"

    def build_extension(self) -> type[Any]:
        """The setuptools `build_ext` command that compiles extensions for this device."""
        from torch.utils.cpp_extension import BuildExtension  # imports setuptools

        command: type[Any] = BuildExtension
        return command

    # Environment and compilation ----------------------------------------------------------------------------

    def runtime_versions(self) -> dict[str, str]:
        """Versions of the vendor's software below torch, by name, for reports; empty when it cannot be told."""
        return {}

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that go to the other nodes of a job."""
        return list(self.spec.export_prefixes)

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that narrow the devices of a process; empty when there are none."""
        return list(self.spec.visible_devices)

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        """Write those variables into `current_env` so that a child process sees just these devices."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Backend to pass to `torch.compile`."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend of `torch.compile`.

        Raises:
            UsageError: torch does not know it; the message lists those it knows.
        """
        from torch._dynamo import list_backends  # takes a second to import

        known = list_backends(exclude_tags=())
        if backend not in known:
            raise UsageError(f"compile backend {backend!r} is not known to torch; known: {', '.join(known)}")
        self._compile_backend = backend
