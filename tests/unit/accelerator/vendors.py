# SPDX-License-Identifier: Apache-2.0
"""The contract: every method of the interface on every backend, through modules with the vendors' signatures.

What a method must give is written once for all backends, in CASES; BACKENDS has what differs. Each backend runs in a
child process, since torch can give only one vendor's name to its spare device type in the life of a process. The
children are forked from one process that has imported torch. As a script this prints what came out as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from unittest import mock

import torch
from fake_vendor import GIB, SPARE_TYPES, TICK_MS, FakeVendor, installed
from interface import METHODS, PROPERTIES
from torch._subclasses.fake_tensor import FakeTensorMode

from anyaccel.accelerator import Accelerator, select, synchronous
from anyaccel.accelerator.spec import CAPABILITY_OF, Capability
from anyaccel.accelerator.torch_device import TorchDeviceAccelerator
from anyaccel.errors import CapabilityError

HERE = Path(__file__).parent


class Case(NamedTuple):
    """How a method is called, and what must come out.

    Attributes:
        call: takes the accelerator, the fake module, and what `given` returned.
        expected: compared with what the call gives, or a function that checks it.
        given: prepares; vendor calls made here are not counted as those of the method.
    """

    call: Callable[[Any, Any, Any], Any]
    expected: Any
    given: Callable[[Any, Any], Any] = lambda a, vendor: None


class Outcome(NamedTuple):
    """What one method did.

    Attributes:
        result: "right", "absent", or what is wrong with it.
        declared: the backend says that it lacks this, so absent is allowed.
        calls: names of the vendor's functions that it called.
        own: the backend itself, or a base class that is no default, has code for it.
    """

    result: str
    declared: bool = False
    calls: tuple[str, ...] = ()
    own: bool = False


class HostTensor(torch.Tensor):
    """A host tensor that can be pinned without a driver."""

    pinned = False

    @staticmethod
    def of(*size: int, dtype: torch.dtype = torch.float32, pinned: bool = False) -> HostTensor:
        tensor = torch.arange(float(torch.Size(size).numel())).to(dtype).view(size).as_subclass(HostTensor)
        tensor.pinned = pinned
        return tensor

    def pin_memory(self, device: Any = None) -> HostTensor:
        assert device is None, "deprecated in torch, and warns"
        copy = self.clone()
        copy.pinned = True
        return copy

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned


class FakeTensors(FakeTensorMode):
    """Tensors on devices that are not there: they have a shape and no data."""

    avoid_device_init = True  # else torch believes the fake module that the device is there


@contextlib.contextmanager
def pinning_without_a_driver() -> Any:
    """torch.empty(pin_memory=True) gives a HostTensor."""
    empty = torch.empty

    def pinned_empty(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        if not pin_memory:
            return empty(*args, **options)
        tensor = empty(*args, **options).as_subclass(HostTensor)
        tensor.pinned = True
        return tensor

    with mock.patch.object(torch, "empty", pinned_empty):
        yield


def each_way(kind: str) -> tuple[Any, ...]:
    """The first and the second device, in every form that a device argument may have."""
    return (0, 1, torch.device(kind, 0), torch.device(kind, 1), f"{kind}:0", f"{kind}:1")


def per_device(method: str) -> Callable[[Any, Any, Any], Any]:
    """Call without an argument, then with each form of an index."""

    def call(a: Any, vendor: Any, given: Any) -> list[Any]:
        function = getattr(a, method)
        return [function(), *(function(where) for where in each_way(a.spec.device_type))]

    return call


def figures(first: int, second: int | None = None) -> list[int]:
    """What per_device() gives for a figure that differs by device; the second one is current."""
    second = first + 1 if second is None else second
    return [second, first, second, first, second, first, second]


def random_state(a: Any, vendor: Any, given: Any) -> list[bool]:
    """Set and get a state with each form of an index."""
    state = torch.Generator().manual_seed(77).get_state()
    seen = []
    for where in (None, *each_way(a.spec.device_type)):
        a.set_rng_state(state, where) if where is not None else a.set_rng_state(state)
        got = a.get_rng_state(where) if where is not None else a.get_rng_state()
        seen.append(got.dtype == torch.uint8 and torch.equal(got, state))
    return seen


def all_states(a: Any, vendor: Any, given: Any) -> bool:
    """Whether the states of all devices can be set and come back."""
    states = [torch.Generator().manual_seed(77).get_state()] * a.device_count()
    a.set_rng_state_all(states)
    return all(map(torch.equal, a.get_rng_state_all(), states))


def guarded(a: Any, vendor: Any, given: Any) -> list[int]:
    """The current device within a guard and after it."""
    with a.device_guard(0):
        inside = a.current_device()
    return [inside, a.current_device()]


def set_device(a: Any, vendor: Any, given: Any) -> list[Any]:
    seen = []
    for where in each_way(a.spec.device_type):
        a.set_device(where)
        seen.append(vendor.state.current if vendor else 0)
    return seen


def stream_of_device(method: str) -> Callable[[Any, Any, Any], Any]:
    """Index of the device whose default stream it is; True for the one queue of a device that has no others."""

    def call(a: Any, vendor: Any, given: Any) -> list[Any]:
        found = per_device(method)(a, vendor, given)
        return [isinstance(item, synchronous.Stream) or item.default_of for item in found]

    return call


def streams(a: Any, vendor: Any, given: Any) -> tuple[bool, ...]:
    before = a.current_stream()
    with a.stream(given):
        inside = a.current_stream()
    return inside == given, a.current_stream() == before


def event(a: Any, vendor: Any, given: Any) -> Any:
    start, end = a.Event(enable_timing=True), a.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def capture(a: Any, vendor: Any, given: Any) -> tuple[bool, bool]:
    with a.capture_to_graph(given, pool=(0, 1), stream=None):
        inside = vendor.state.capturing if vendor else False
    return inside, vendor.state.capturing if vendor else False


def capturing(a: Any, vendor: Any, given: Any) -> tuple[bool, bool]:
    if vendor is None or not hasattr(vendor, "graph"):
        return a.is_current_stream_capturing(), a.is_current_stream_capturing()
    with given:
        inside = a.is_current_stream_capturing()
    return inside, a.is_current_stream_capturing()


def pin_each_way(a: Any, vendor: Any, given: Any) -> Any:
    """A copy, new memory of the same shape, flat new memory, and the older interface's second argument."""
    with pinning_without_a_driver():
        source = HostTensor.of(2, 3)
        made = [a.pin_memory(source), a.pin_memory(source, 1), a.pin_memory(source, make_copy=False)]
        made.append(a.pin_memory(source, make_copy=False, match_shape=False))
    assert torch.equal(made[0], source) and torch.equal(made[1], source), "a copy has the values"
    return [(getattr(tensor, "pinned", False), tuple(tensor.shape)) for tensor in made]


def pin_empty(a: Any, vendor: Any, given: Any) -> Any:
    with pinning_without_a_driver():
        made = [a.pin_empty(2, 3, dtype=torch.int8), a.pin_empty((4,), dtype=torch.float64)]
    return [(getattr(tensor, "pinned", False), tuple(tensor.shape), tensor.dtype) for tensor in made]


def pin_empty_like(a: Any, vendor: Any, given: Any) -> Any:
    with pinning_without_a_driver():
        made = [a.pin_empty_like(torch.ones(2, 3)), a.pin_empty_like(torch.ones(4), dtype=torch.int8)]
    return [(getattr(tensor, "pinned", False), tuple(tensor.shape), tensor.dtype) for tensor in made]


def typed_tensor(name: str) -> Callable[[Any, Any, Any], Any]:
    def call(a: Any, vendor: Any, given: Any) -> Any:
        with FakeTensors():
            made = [getattr(a, name)(2, 3), getattr(a, name)([1, 0])]
        return [(tensor.dtype, tensor.device.type, tuple(tensor.shape)) for tensor in made]

    return call


def on_accelerator(a: Any, vendor: Any, given: Any) -> Any:
    with FakeTensors():
        kind = a.spec.device_type
        there = [torch.empty(1, device=kind), torch.empty(1, device=torch.device(kind, 1))]
        return [a.on_accelerator(tensor) for tensor in there], a.on_accelerator(torch.empty(1, device="meta"))


def host_registration(a: Any, vendor: Any, given: Any) -> Any:
    registered = a.register_host_memory(0x1000, 8192)
    if registered is False and a.unregister_host_memory(0x1000) is None:  # how this capability is absent
        raise CapabilityError(a._name, "register_host_memory", "it answers False")
    there = dict(vendor.state.registered)
    a.unregister_host_memory(0x1000)
    try:
        a.unregister_host_memory(0x1000)
    except RuntimeError as error:
        return registered, there, vendor.state.registered, "713" in str(error)
    return "unregistering twice raised nothing"


def set_visible(a: Any, vendor: Any, given: Any) -> dict[str, str]:
    environment: dict[str, str] = {}
    a.set_visible_devices_envs(environment, [0, "GPU-5f3"])
    return environment


def compile_backend(a: Any, vendor: Any, given: Any) -> str:
    a.set_compile_backend("eager")
    return a.get_compile_backend()


def no_such_op(a: Any, vendor: Any, given: Any) -> bool:
    try:
        a.create_op_builder("NoSuchBuilder")
    except CapabilityError as error:
        return error.capability == "NoSuchBuilder"
    return False


def ranges(a: Any, vendor: Any, given: Any) -> Any:
    a.range_push("step", domain="d", category="c")
    a.range_pop(domain="d")


def generators(a: Any, vendor: Any, given: Any) -> Any:
    """Each generator is the one whose state a seed changes; they work before the device is initialised."""
    first, second, current = a.default_generator(0), a.default_generator(1), a.default_generator()
    a.manual_seed(1234)
    return [isinstance(item, torch.Generator) for item in (first, second, current)], current.initial_seed()


def seeded(method: str) -> Callable[[Any, Any, Any], Any]:
    def call(a: Any, vendor: Any, given: Any) -> Any:
        getattr(a, method)(5)
        return [a.default_generator(index).initial_seed() == 5 for index in (0, 1)]

    return call


def seeded_states(method: str, state_of: Callable[[int], torch.Tensor]) -> Case:
    """The same as seeded(), where there are states but no generators."""

    def call(a: Any, vendor: Any, given: Any) -> Any:
        getattr(a, method)(5)
        return [torch.equal(a.get_rng_state(index), state_of(5)) for index in (0, 1)]

    return Case(call, CASES[method].expected)


def generator_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def running_seed(seed: int) -> torch.Tensor:
    """The state of a device of torch_xla."""
    return torch.tensor([seed]).view(torch.uint8)


def chosen_devices(a: Any, vendor: Any, given: Any) -> list[int]:
    """set_device() where the vendor's module has no such function."""
    chosen = []
    for where in each_way("xla"):
        a.set_device(where)
        chosen += [a.current_device()] if a.device_name() == f"xla:{a.current_device()}" else []
    return chosen


def running_seeds(a: Any, vendor: Any, given: Any) -> list[bool]:
    """random_state() and all_states() with such states; a seed is any number of 64 bits."""
    states = [running_seed(7), running_seed(8)]
    a.set_rng_state_all(states)
    seen = list(map(torch.equal, a.get_rng_state_all(), states))
    for number, where in enumerate((None, *each_way("xla"))):
        state = running_seed(-1 - number)
        a.set_rng_state(state, where)
        seen.append(torch.equal(a.get_rng_state(where), state))
    return seen


def lazily(a: Any, vendor: Any, given: Any) -> list[str]:
    """Nothing is dropped: the callback has run once the device is in use."""
    ran: list[str] = []
    a.lazy_call(lambda: ran.append("callback"))
    a.current_device()
    return ran


PINNED = [(True, (2, 3)), (True, (2, 3)), (True, (2, 3)), (True, (6,))]
NOT_PINNED = [(False, (2, 3))] * 4
PINNED_EMPTY = [(True, (2, 3), torch.int8), (True, (4,), torch.float64)]
PINNED_LIKE = [(True, (2, 3), torch.float32), (True, (4,), torch.int8)]
DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def new_event(a: Any, vendor: Any) -> Any:
    return a.Event()


# What a device with a complete torch module does; `{kind}` in a text is the device type.
CASES: dict[str, Case] = {
    "is_synchronized_device": Case(lambda a, v, g: a.is_synchronized_device(), False),
    "use_host_timers": Case(lambda a, v, g: a.use_host_timers(), False),
    "resolves_data_dependency": Case(lambda a, v, g: a.resolves_data_dependency(), False),
    "handles_memory_backpressure": Case(lambda a, v, g: a.handles_memory_backpressure(), False),
    "device_name": Case(lambda a, v, g: [a.device_name(), a.device_name(0)], ["{kind}", "{kind}:0"]),
    "device": Case(lambda a, v, g: [str(a.device()), str(a.device(1))], ["{kind}", "{kind}:1"]),
    "set_device": Case(set_device, [0, 1, 0, 1, 0, 1]),
    "device_guard": Case(guarded, [0, 1]),
    "current_device": Case(lambda a, v, g: a.current_device(), 1),
    "current_device_name": Case(lambda a, v, g: a.current_device_name(), "{kind}:1"),
    "device_count": Case(lambda a, v, g: a.device_count(), 2),
    "synchronize": Case(per_device("synchronize"), [None] * 7),
    "is_available": Case(lambda a, v, g: a.is_available(), True),
    "random": Case(lambda a, v, g: a.random() is torch.random, True),
    "set_rng_state": Case(random_state, [True] * 7),
    "get_rng_state": Case(random_state, [True] * 7),
    "get_rng_state_all": Case(all_states, True),
    "set_rng_state_all": Case(all_states, True),
    "manual_seed": Case(seeded("manual_seed"), [False, True]),
    "manual_seed_all": Case(seeded("manual_seed_all"), [True, True]),
    "initial_seed": Case(lambda a, v, g: a.initial_seed(), 11, lambda a, v: a.manual_seed(11)),
    "default_generator": Case(generators, ([True] * 3, 1234)),
    "Stream": Case(lambda a, v, g: type(a.Stream(device=0, priority=-1)).__name__, "Stream"),
    "stream": Case(streams, (True, True), lambda a, v: a.Stream()),
    "current_stream": Case(stream_of_device("current_stream"), figures(0)),
    "default_stream": Case(stream_of_device("default_stream"), figures(0)),
    "Event": Case(event, TICK_MS),
    "empty_cache": Case(lambda a, v, g: a.empty_cache(), None),
    "memory_allocated": Case(per_device("memory_allocated"), figures(3 * GIB)),
    "max_memory_allocated": Case(per_device("max_memory_allocated"), figures(4 * GIB)),
    "memory_reserved": Case(per_device("memory_reserved"), figures(5 * GIB)),
    "max_memory_reserved": Case(per_device("max_memory_reserved"), figures(6 * GIB)),
    "memory_cached": Case(per_device("memory_cached"), figures(5 * GIB)),
    "max_memory_cached": Case(per_device("max_memory_cached"), figures(6 * GIB)),
    "memory_stats": Case(
        lambda a, v, g: [item["allocated_bytes.all.current"] for item in per_device("memory_stats")(a, v, g)],
        figures(3 * GIB),
    ),
    **{
        name: Case(
            lambda a, v, g, name=name: (per_device(name)(a, v, g), a.max_memory_allocated(0), a.max_memory_allocated()),
            ([None] * 7, 3 * GIB, 3 * GIB + 1),
        )
        for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
    },
    "total_memory": Case(per_device("total_memory"), figures(80 * GIB)),
    "device_properties": Case(
        lambda a, v, g: [item.total_memory for item in per_device("device_properties")(a, v, g) if item.name],
        figures(80 * GIB),
    ),
    "device_capability": Case(
        lambda a, v, g: [len(each) for each in per_device("device_capability")(a, v, g)], [2] * 7
    ),
    "available_memory": Case(per_device("available_memory"), figures(70 * GIB)),
    "mem_get_info": Case(
        lambda a, v, g: [free < total for free, total in per_device("mem_get_info")(a, v, g)], [True] * 7
    ),
    "memory_summary": Case(lambda a, v, g: all(map(bool, per_device("memory_summary")(a, v, g))), True),
    "is_bf16_supported": Case(lambda a, v, g: a.is_bf16_supported(), True),
    "is_fp16_supported": Case(lambda a, v, g: a.is_fp16_supported(), True),
    "is_fp64_supported": Case(lambda a, v, g: a.is_fp64_supported(), True),
    "supported_dtypes": Case(
        lambda a, v, g: a.supported_dtypes(), [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    ),
    "range_push": Case(ranges, None),
    "range_pop": Case(lambda a, v, g: a.range_pop(), None, lambda a, v: a.range_push("step")),
    "lazy_call": Case(lazily, ["callback"]),
    "communication_backend_name": Case(lambda a, v, g: a.communication_backend_name(), "?"),
    "is_triton_supported": Case(lambda a, v, g: a.is_triton_supported(), False),  # Triton is not on the path
    "prefer_triton_grouped_mm": Case(lambda a, v, g: a.prefer_triton_grouped_mm(), False),
    "create_graph": Case(lambda a, v, g: type(a.create_graph()).__name__ == a.spec.graph_class, True),
    "capture_to_graph": Case(capture, (True, False), lambda a, v: a.create_graph()),
    "replay_graph": Case(lambda a, v, g: a.replay_graph(g), None, lambda a, v: a.create_graph()),
    "is_current_stream_capturing": Case(
        capturing,
        (True, False),
        lambda a, v: v and hasattr(v, "graph") and v.graph(getattr(v, a.spec.graph_class)()),
    ),
    **{
        name: Case(typed_tensor(name), [(dtype, "{kind}", (2, 3)), (dtype, "{kind}", (2,))])
        for name, dtype in DTYPES.items()
    },
    "pin_memory": Case(pin_each_way, PINNED),
    "is_pinned": Case(
        lambda a, v, g: [a.is_pinned(HostTensor.of(2, pinned=True)), a.is_pinned(HostTensor.of(2))], [True, False]
    ),
    "unpin_memory": Case(lambda a, v, g: a.unpin_memory(g), None, lambda a, v: HostTensor.of(2, pinned=True)),
    "pin_memory_alignment": Case(lambda a, v, g: a.pin_memory_alignment(), 1),
    "pin_empty": Case(pin_empty, PINNED_EMPTY),
    "pin_empty_like": Case(pin_empty_like, PINNED_LIKE),
    "register_host_memory": Case(host_registration, (True, {0x1000: (8192, 0)}, {}, True)),
    "unregister_host_memory": Case(host_registration, (True, {0x1000: (8192, 0)}, {}, True)),
    "on_accelerator": Case(on_accelerator, ([True, True], False)),
    "op_builder_dir": Case(lambda a, v, g: a.op_builder_dir(), "anyaccel.ops.builders.host"),
    "create_op_builder": Case(no_such_op, True),
    "get_op_builder": Case(lambda a, v, g: a.get_op_builder("NoSuchBuilder"), None),
    "build_extension": Case(lambda a, v, g: a.build_extension().__name__, "BuildExtension"),
    "runtime_versions": Case(lambda a, v, g: a.runtime_versions(), {}),
    "export_envs": Case(lambda a, v, g: a.export_envs(), "?"),
    "visible_devices_envs": Case(lambda a, v, g: a.visible_devices_envs(), ["?"]),
    "set_visible_devices_envs": Case(set_visible, {"?": "0,GPU-5f3"}),
    "get_compile_backend": Case(lambda a, v, g: a.get_compile_backend(), "inductor"),
    "set_compile_backend": Case(compile_backend, "eager"),
}

POLICIES = (
    "is_synchronized_device",
    "use_host_timers",
    "resolves_data_dependency",
    "handles_memory_backpressure",
)
GRAPHS = {"create_graph", "capture_to_graph", "replay_graph"}
REGISTRATION = {"register_host_memory", "unregister_host_memory"}


@dataclass(frozen=True)
class Backend:
    """What is particular to one backend.

    Attributes:
        collective: its `torch.distributed` backend.
        exports: prefixes of the environment variables that go to other nodes.
        visible: the variables that narrow the devices of a process.
        differs: what must come out where that is not what CASES says; a function checks it.
        absent: methods that raise CapabilityError.
        outdated: those of them that only this version of the vendor's module lacks, so that the backend cannot
            declare them.
        entry: name in the registry, where it is not the backend's.
        cases: other cases, for what its state is made of.
    """

    collective: str
    exports: list[str]
    visible: str
    differs: Mapping[str, Any] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    outdated: frozenset[str] = frozenset()
    entry: str = ""
    cases: Mapping[str, Case] = field(default_factory=dict)


VENDOR = ["LD_LIBRARY", "PATH"]
INTEL = ["CCL", "FI_", "I_MPI", "ONEAPI", "SYCL", "ZE_"]
NO_FP64 = {
    "is_fp64_supported": False,
    "supported_dtypes": [torch.float32, torch.float16, torch.bfloat16],
}
XPU_ABSENT = frozenset(REGISTRATION)
NOT_CAPTURING = {"is_current_stream_capturing": (False, False)}
HOST_FIGURE = lambda got: all(isinstance(item, int) and item > 0 for item in got)  # noqa: E731


def backend_cuda(**changes: Any) -> Backend:
    return Backend(
        **{"collective": "nccl", "exports": ["NCCL", "TORCH_NCCL"], "visible": "CUDA_VISIBLE_DEVICES", **changes}
    )


BACKENDS: dict[str, Backend] = {
    "cuda": backend_cuda(),
    "cuda.rocm": backend_cuda(visible="HIP_VISIBLE_DEVICES", entry="cuda"),
    "cpu": Backend(
        "gloo",
        ["CCL", "GLOO"],
        "",
        {
            **dict.fromkeys(POLICIES, True),
            "device_name": ["cpu", "cpu"],
            "device": ["cpu", "cpu"],
            "set_device": [0] * 6,  # nothing is set: a process is one device
            "device_guard": [0, 0],
            "current_device": 0,
            "current_device_name": "cpu",
            "device_count": lambda got: got >= 1,
            "manual_seed": [True, True],
            "current_stream": [True] * 7,
            "default_stream": [True] * 7,
            "stream": (True, True),
            "Event": lambda got: 0 <= got < 1000,
            **{name: HOST_FIGURE for name in CASES if "memory_" in name and name.endswith(("ed", "s", "memory"))},
            "total_memory": HOST_FIGURE,
            "device_properties": HOST_FIGURE,
            "available_memory": HOST_FIGURE,
            **{name: lambda got: got[0] == [None] * 7 for name in CASES if name.startswith("reset")},
            "is_fp16_supported": lambda got: isinstance(got, bool),
            "supported_dtypes": lambda got: set(got) >= {torch.float32, torch.bfloat16, torch.float64},
            "create_graph": lambda got: True,
            "capture_to_graph": (False, False),
            **NOT_CAPTURING,
            "pin_memory": NOT_PINNED,
            "pin_empty": lambda got: [item[0] for item in got] == [False, False],
            "pin_empty_like": lambda got: [item[0] for item in got] == [False, False],
            "op_builder_dir": "anyaccel.ops.builders.cpu",
        },
        frozenset(REGISTRATION),
    ),
    "xpu.native": Backend("xccl", INTEL, "ZE_AFFINITY_MASK", NO_FP64, XPU_ABSENT),
    "xpu.ipex": Backend(
        "xccl", INTEL, "ZE_AFFINITY_MASK", {**NO_FP64, "build_extension": "DpcppBuildExtension"}, XPU_ABSENT
    ),
    "xpu.ipex.older": Backend(
        "xccl",
        INTEL,
        "ZE_AFFINITY_MASK",
        {**NO_FP64, **NOT_CAPTURING, "build_extension": "DpcppBuildExtension"},
        XPU_ABSENT | GRAPHS | {"available_memory", "mem_get_info"},
        frozenset({"available_memory", "mem_get_info"}),
        entry="xpu.ipex",
    ),
    "xpu.external": Backend(
        "ccl",
        [],
        "ZE_AFFINITY_MASK",
        {
            # The package's words: a constant, a total without what others hold, no graphs, which it says with None.
            "is_fp64_supported": False,
            "supported_dtypes": [torch.float32, torch.float16, torch.bfloat16],
            "available_memory": [77 * GIB] * 7,
            "create_graph": False,
            "capture_to_graph": (False, False),
            "set_compile_backend": "inductor",
        },
        XPU_ABSENT,
    ),
    "xpu.external.older": Backend(
        "ccl",
        INTEL,
        "ZE_AFFINITY_MASK",
        {**NO_FP64, "op_builder_dir": "intel_extension_for_deepspeed.op_builder"},
        XPU_ABSENT,
        entry="xpu.external",
    ),
    "npu": Backend(
        "hccl",
        ["ASCEND", "HCCL", *VENDOR],
        "ASCEND_RT_VISIBLE_DEVICES",
        {
            "pin_memory_alignment": 4096,
            "register_host_memory": (True, {0x1000: (8192, 2)}, {}, True),
            "unregister_host_memory": (True, {0x1000: (8192, 2)}, {}, True),
            "runtime_versions": lambda got: list(got) == ["cann"],
        },
    ),
    "sdaa": Backend(
        "tccl",
        ["TCCL", "SDAA", *VENDOR],
        "SDAA_VISIBLE_DEVICES",
        NOT_CAPTURING,
        frozenset({*GRAPHS, *REGISTRATION}),
    ),
    "mps": Backend(
        "gloo",
        [],
        "",
        {
            **NO_FP64,
            **NOT_CAPTURING,
            "resolves_data_dependency": True,
            "set_device": [1] * 6,  # nothing is set: there is one device
            "device_guard": [0, 0],
            "current_device": 0,
            "current_device_name": "mps:0",
            "manual_seed": lambda got: any(got),
            "manual_seed_all": lambda got: any(got),
            "Stream": "Queue",
            "stream": (True, True),
            "current_stream": [True] * 7,
            "default_stream": [True] * 7,
            **{
                name: [figure * GIB + 1] * 7
                for name, figure in {
                    "memory_allocated": 3,
                    "memory_reserved": 5,
                    "memory_cached": 5,
                    "max_memory_allocated": 5,  # no peak is kept: the driver's figure, as in DeepSpeed
                    "max_memory_reserved": 5,
                    "max_memory_cached": 5,
                    "memory_stats": 3,
                    "total_memory": 80,
                    "device_properties": 80,
                }.items()
            },
            **{
                name: lambda got: got[0] == [None] * 7
                for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")
            },
            "available_memory": [75 * GIB] * 7,
            "pin_memory": NOT_PINNED,
            "pin_empty": lambda got: [item[0] for item in got] == [False, False],
            "pin_empty_like": lambda got: [item[0] for item in got] == [False, False],
        },
        frozenset({*GRAPHS, *REGISTRATION}),
    ),
    "hpu": Backend(
        "hccl",
        ["HABANA", "HCCL", "PT_HPU", *VENDOR],
        "HABANA_VISIBLE_MODULES",
        {
            "resolves_data_dependency": True,
            "handles_memory_backpressure": True,
            "device_name": ["hpu", "hpu"],
            "device": ["hpu", "hpu"],
            "manual_seed": [True, True],
            "default_generator": ([True] * 3, 1234),
            "get_compile_backend": "hpu_backend",
            "memory_stats": figures(3 * GIB),
        },
        frozenset({"memory_reserved", "memory_cached", "max_memory_reserved", "max_memory_cached", *REGISTRATION}),
    ),
    "mlu": Backend(
        "cncl",
        ["NEUWARE_HOME", "CNCL", *VENDOR],
        "MLU_VISIBLE_DEVICES",
        absent=frozenset(REGISTRATION),
    ),
    "supa": Backend("bccl", ["BCCL", "BIREN", "SUPA", *VENDOR], "SUPA_VISIBLE_DEVICES", NO_FP64),
    "musa": Backend(
        "mccl",
        ["MCCL", "MUSA", *VENDOR],
        "MUSA_VISIBLE_DEVICES",
        absent=frozenset(REGISTRATION),
    ),
    "mtia": Backend(
        "",
        [],
        "",
        absent=frozenset(
            {
                "memory_reserved",
                "memory_cached",
                "max_memory_reserved",
                "max_memory_cached",
                "available_memory",
                "mem_get_info",
                "is_current_stream_capturing",
                "communication_backend_name",
                *REGISTRATION,
            }
        ),
    ),
}
FOUND_BY_CUDA = {
    "use_host_timers": True,  # events of this runtime measure nothing unless a variable says so
    "export_envs": ["BKCL", "XPU", "XMLIR", *VENDOR],
}
BACKENDS["klxpu"] = backend_cuda(differs=FOUND_BY_CUDA)
BACKENDS["neuron"] = Backend(
    "neuron",
    ["NEURON", "FI_", *VENDOR],
    "NEURON_RT_VISIBLE_CORES",
    {**NO_FP64, **NOT_CAPTURING, "get_compile_backend": "neuron"},
    frozenset({"default_generator", "available_memory", "mem_get_info", *GRAPHS, *REGISTRATION}),
    cases={name: seeded_states(name, generator_state) for name in ("manual_seed", "manual_seed_all")},
)
_IN_USE = {name for name in CASES if "memory_" in name and name.endswith(("allocated", "reserved", "cached", "stats"))}
BACKENDS["tpu"] = Backend(
    "tpu_dist",
    ["TPU_", "LIBTPU_", *VENDOR],
    "TPU_VISIBLE_DEVICES",
    {
        **NOT_CAPTURING,
        "use_host_timers": True,
        "resolves_data_dependency": True,
        "get_compile_backend": "tpu",
    },
    frozenset({*_IN_USE, "memory_summary", "available_memory", "mem_get_info", "Event", *GRAPHS, *REGISTRATION}),
)
BACKENDS["xla"] = Backend(
    "xla",
    ["PJRT_", "XLA_", "TPU_", "LIBTPU_", "NEURON", *VENDOR],
    "TPU_VISIBLE_DEVICES",
    {
        **NOT_CAPTURING,
        "use_host_timers": True,
        "resolves_data_dependency": True,
        "available_memory": [77 * GIB] * 7,
        "get_compile_backend": "openxla",
        "pin_memory": NOT_PINNED,
        "pin_empty": lambda got: [item[0] for item in got] == [False, False],
        "pin_empty_like": lambda got: [item[0] for item in got] == [False, False],
    },
    frozenset(
        {"Stream", "stream", "current_stream", "default_stream", "Event", "default_generator", *GRAPHS, *REGISTRATION}
        | _IN_USE - {"memory_allocated", "memory_stats"}
    ),
    cases={
        **{name: Case(running_seeds, [True] * 9) for name in CASES if "rng_state" in name},
        "set_device": Case(chosen_devices, [0, 1] * 3),
        **{name: seeded_states(name, running_seed) for name in ("manual_seed", "manual_seed_all")},
    },
)
BACKENDS["hpu.eager"] = Backend(
    BACKENDS["hpu"].collective,
    BACKENDS["hpu"].exports,
    BACKENDS["hpu"].visible,
    {**BACKENDS["hpu"].differs, **NOT_CAPTURING},
    BACKENDS["hpu"].absent | GRAPHS,
    entry="hpu",
)
NAMES = (*METHODS, *sorted(PROPERTIES))


def expected_of(name: str, method: str) -> Any:
    """What must come out of a method."""
    backend = BACKENDS[name]
    if method in backend.differs:
        return backend.differs[method]
    variables = [backend.visible] if backend.visible else []
    fixed = {
        "communication_backend_name": backend.collective,
        "export_envs": backend.exports,
        "visible_devices_envs": variables,
        "set_visible_devices_envs": dict.fromkeys(variables, "0,GPU-5f3"),
    }
    return fixed.get(method, backend.cases.get(method, CASES[method]).expected)


def filled(expected: Any, kind: str) -> Any:
    """With the device type in place of `{kind}`."""
    if isinstance(expected, str):
        return expected.replace("{kind}", kind)
    if isinstance(expected, list | tuple):
        return type(expected)(filled(item, kind) for item in expected)
    return expected


def declared_absent(a: Accelerator, method: str) -> bool:
    """Whether the backend says itself that it lacks the method: has() is false, or the spec names it."""
    needs = {"replay_graph": Capability.GRAPHS}.get(method) or CAPABILITY_OF.get(method)
    method = {"max_memory_cached": "max_memory_reserved"}.get(method, method)  # its old name
    return method in a.spec.capabilities.absent or (needs is not None and not a.has(needs))


def has_own_code(a: Accelerator, method: str) -> bool:
    """Whether a backend, and not the interface's defaults, says what the method does."""
    owner = next(kind for kind in type(a).__mro__ if method in vars(kind))
    return owner is not Accelerator and owner is not TorchDeviceAccelerator


def run_case(name: str, method: str, folder: Path) -> Outcome:
    """Call one method of a new accelerator over a new module."""
    backend = BACKENDS[name]
    case = backend.cases.get(method, CASES[method])
    with contextlib.ExitStack() as stack:
        vendor: FakeVendor | None = None
        if name != "cpu":
            vendor = stack.enter_context(installed(name, folder))
        kind: Any = select.REGISTRY[backend.entry or name].load()
        missing = kind.probe()
        if missing is not None:
            return Outcome(f"the probe says: {missing.reason}")
        accelerator = kind()
        own = has_own_code(accelerator, method)
        declared = declared_absent(accelerator, method)

        seen: list[str] = []

        def counted(*args: Any, **kwargs: Any) -> Any:
            assert vendor is not None
            start = len(vendor.calls)
            try:
                return function(*args, **kwargs)
            finally:
                seen.extend(call.function for call in vendor.calls[start:])

        def calls() -> tuple[str, ...]:
            if method in PROPERTIES and vendor:  # what is made from it, and not what that does later
                seen.extend(call.function for call in vendor.calls if "." not in call.function)
            return tuple(dict.fromkeys(seen))

        try:
            given = case.given(accelerator, vendor)
            if vendor:
                vendor.calls.clear()
                if method not in PROPERTIES:
                    function = getattr(accelerator, method)
                    setattr(accelerator, method, counted)
            got = case.call(accelerator, vendor, given)
        except CapabilityError:
            return Outcome("absent", declared, calls(), own)
        except Exception:  # noqa: BLE001  the report has it
            return Outcome(traceback.format_exc(limit=-4), declared, calls(), own)
        expected = filled(expected_of(name, method), accelerator.spec.device_type)
        right = expected(got) if callable(expected) else expected == got
        wrong = f"gives {got!r}" + ("" if callable(expected) else f", must be {expected!r}")
        return Outcome("right" if right else wrong, declared, calls(), own)


def run_backend(name: str) -> dict[str, Outcome]:
    """Every method of one backend; this process must not have run one with another spare device type."""
    if name in SPARE_TYPES:
        torch.utils.rename_privateuse1_backend(name)
    with tempfile.TemporaryDirectory(prefix="anyaccel-vendor-") as folder:
        return {method: run_case(name, method, Path(folder)) for method in NAMES}


@functools.cache
def run_all() -> dict[str, dict[str, Outcome]]:
    """Every backend, each in a child of its own, from a new process; once in this process, about 20 s."""
    command = [sys.executable, str(Path(__file__)), *BACKENDS]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "LOCAL_", "ASCEND"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    return {name: {method: Outcome(*values) for method, values in outcomes.items()} for name, outcomes in found.items()}


def main(names: list[str]) -> None:
    import torch._dynamo
    import torch.utils.cpp_extension  # so that the children need not import them

    torch._dynamo.list_backends()  # imports for a second
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    torch.set_num_threads(1)
    gc.freeze()  # else the children copy what they only look through
    with contextlib.ExitStack() as files:
        answers = {name: files.enter_context(tempfile.TemporaryFile("w+")) for name in names}
        waiting, children = list(names), {}
        while waiting or children:
            if waiting and len(children) < len(os.sched_getaffinity(0)):
                name = waiting.pop(0)
                child = os.fork()
                if child == 0:
                    answer_for(name, answers[name])
                children[child] = name
                continue
            child, status = os.wait()
            if status:
                sys.exit(f"the child for {children[child]} failed")
            del children[child]
        for answer in answers.values():
            answer.seek(0)
        json.dump({name: json.load(answer) for name, answer in answers.items()}, sys.stdout)


def answer_for(name: str, answer: IO[str]) -> NoReturn:
    """What a child process does: its backend, and end."""
    code = 1
    try:
        json.dump(run_backend(name), answer)
        answer.flush()
        code = 0
    except BaseException:  # noqa: BLE001  a child must not go on as its parent
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
