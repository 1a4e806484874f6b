# SPDX-License-Identifier: Apache-2.0
"""The module `torch.simd`: functions of torch.cuda's names; what torch.accelerator does for any device is its work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from anyaccel_simd0 import _C

Index = int | str | torch.device | None

_lock = threading.RLock()
_initialized = False
_queued: list[Callable[[], Any]] = []
default_generators: tuple[torch.Generator, ...] = ()


class DeviceProperties(NamedTuple):
    """What the device is.

    Attributes:
        name: for people.
        total_memory: bytes.
        physical_device: its number when SIMD0_VISIBLE_DEVICES hides none.
    """

    name: str
    total_memory: int
    physical_device: int


# Devices ----------------------------------------------------------------------------------------------------


def device_count() -> int:
    """Number of devices that SIMD0_VISIBLE_DEVICES leaves to this process; opens none."""
    return torch._C._accelerator_hooks_device_count()


def is_available() -> bool:
    return device_count() > 0


def current_device() -> int:
    return torch._C._accelerator_hooks_get_current_device()


def set_device(device: Index) -> None:
    torch._C._accelerator_hooks_set_current_device(_index(device))


def synchronize(device: Index = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(device))


def get_device_properties(device: Index = None) -> DeviceProperties:
    index = _index(device)
    _free, total = mem_get_info(index)
    number = _C.physical_device(index)
    return DeviceProperties(f"simulated device {number}", total, number)


def get_device_name(device: Index = None) -> str:
    return get_device_properties(device).name


class device:
    """Context in which this is the current device."""

    def __init__(self, device: Index) -> None:
        self.index = _index(device)
        self.previous = -1

    def __enter__(self) -> None:
        self.previous = torch._C._accelerator_hooks_exchange_device(self.index)

    def __exit__(self, *error: object) -> None:
        torch._C._accelerator_hooks_exchange_device(self.previous)


def _index(device: Index) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    found = torch.device(device)
    if found.type != "simd":
        raise ValueError(f"a simd device is expected, not {str(found)!r}")
    return current_device() if found.index is None else found.index


# Initialisation ---------------------------------------------------------------------------------------------


def init() -> None:
    """Make the generators and run what waited for that; a second call does nothing."""
    global _initialized, default_generators
    with _lock:
        if _initialized:
            return
        default_generators = tuple(_C.default_generator(index) for index in range(device_count()))
        _initialized = True  # first: what waited may use the device
        while _queued:
            _queued.pop(0)()


_lazy_init = init  # the name by which torch calls it before it makes the first tensor


def is_initialized() -> bool:
    return _initialized


def _lazy_call(callback: Callable[[], Any]) -> None:
    with _lock:
        if not _initialized:
            _queued.append(callback)
            return
    callback()


def _is_in_bad_fork() -> bool:
    return False  # the memory is the process's own, so a child has its copy


# Random numbers ---------------------------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    _lazy_call(lambda: _generator(None).manual_seed(seed))


def manual_seed_all(seed: int) -> None:
    _lazy_call(lambda: [generator.manual_seed(seed) for generator in default_generators])


def seed() -> None:
    _lazy_call(lambda: _generator(None).seed())


def initial_seed() -> int:
    return _generator(None).initial_seed()


def get_rng_state(device: Index = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Index = None) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def _generator(device: Index) -> torch.Generator:
    init()
    return _C.default_generator(_index(device))


# Streams and events -----------------------------------------------------------------------------------------


# [stream]
class Stream(torch.Stream):
    """A queue of work. torch.Stream reaches the device through the guard in csrc/runtime.cpp."""

    def __new__(cls, device: Index = None, priority: int = 0, **ids: int) -> Stream:
        if ids:  # stream_id, device_index, device_type: one that there is already
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=f"simd:{_index(device)}", priority=priority)


class _EventType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Event) and value.device.type == "simd"


class Event(metaclass=_EventType):
    """A mark in a stream; `elapsed_time` is in milliseconds.

    Makes a plain torch.Event: methods of torch that take an event refuse a subclass.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event("simd", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


# [/stream]


def current_stream(device: Index = None) -> Stream:
    return _same_stream(torch._C._accelerator_getStream(_index(device)))


def default_stream(device: Index = None) -> Stream:
    device_type = current_stream(device).device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make it the current stream, and its device the current device."""
    if stream is not None:
        torch._C._accelerator_setStream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Context in which work goes to `stream`; None changes nothing."""
    if stream is None:
        yield None
        return
    device_before = current_device()
    stream_before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield stream
    finally:
        set_stream(stream_before)
        set_device(device_before)


def _same_stream(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


# Memory -----------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    torch._C._accelerator_emptyCache()


def memory_stats(device: Index = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: Index = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Index = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Index = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Index = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Index = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Index = None) -> tuple[int, int]:
    """Bytes that are free, and all of them."""
    return torch.accelerator.get_memory_info(_index(device))


# Data types -------------------------------------------------------------------------------------------------


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What torch.autocast may use."""
    return [torch.bfloat16, torch.float16]
