# SPDX-License-Identifier: Apache-2.0
"""Torch device modules built from recorded signatures, and fake packages that bring them.

Calling a function that the vendor does not have is an AttributeError, and arguments that it does not take are a
TypeError, as with the real module. What the functions answer is the state of two made-up devices.

A package (`import torch_npu`) is a real folder on the path, here or in a child process: `write_package()`.
`installed()` does that for a block of code. For the parts of torch (cuda, xpu, mps, mtia) it makes torch look like a
build that has them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from anyaccel.vendors import VENDORS

RECORDED = Path(__file__).parents[2] / "data" / "vendor_api"
GIB = 1 << 30
TICK_MS = 2.5  # between two events that are recorded one after the other
# Their packages give torch's PrivateUse1 the name of the device.
SPARE_TYPES = [
    name
    for name, vendor in VENDORS.items()
    for _, package in vendor.backends.values()
    if package in (f"torch_{name}", f"torch_{name}x") and name != "xla"  # xla is a device type of torch's own
]


class Call(NamedTuple):
    """One call of a vendor's function, with its arguments by name."""

    function: str
    arguments: dict[str, Any]


@functools.cache
def parse_signature(text: str) -> inspect.Signature:
    """The signature of `text`, as it stands between the parentheses of a definition."""
    return inspect.signature(eval(f"lambda {text}: None"))


class FakeVendor(ModuleType):
    """The module of a vendor.

    Args:
        name: of the vendor, and of its file in tests/data/vendor_api.
        lazy: hpu in lazy mode, which has more functions than eager mode.

    Attributes:
        calls: what was called, in order, torch's own calls left out.
        answers: what a function answers instead of what it would; a value, or a function of its arguments.
    """

    def __init__(self, name: str, lazy: bool = True) -> None:
        recorded = json.loads((RECORDED / f"{name}.json").read_text())
        device_type = "xpu" if name == "ipex" else name
        super().__init__(f"torch.{device_type}")
        hidden = set() if lazy else set(recorded.get("lazy_mode_only", ()))
        self.vendor = name
        self.device_type = device_type
        self.recorded = recorded
        self.recorded_functions = set(recorded["functions"]) - hidden
        self.calls: list[Call] = []
        self.answers: dict[str, Any] = {}
        self.state = State(self)
        for function in self.recorded_functions:
            setattr(self, function, self._function(function, recorded["functions"][function]))
        for kind, methods in recorded["classes"].items():
            if kind not in hidden:
                setattr(self, kind, self._class(kind, methods))
        for submodule, functions in recorded["submodules"].items():
            bound: Any = {item: self._function(f"{submodule}.{item}", text) for item, text in functions.items()}
            first, *inner = submodule.split(".")
            for part in reversed(inner):
                bound = {part: SimpleNamespace(**bound)}
            setattr(self, first, SimpleNamespace(**bound))
        if name == "hpu":
            self.random = _HpuRandom(**vars(self.random))
            self.random.vendor = self

    def __getattr__(self, name: str) -> Any:
        """`default_generators`: empty until the device is initialised; on musa not even there."""
        if name == "is_initialized" and sys._getframe(1).f_globals["__name__"].startswith("torch."):
            return self.state.is_initialized  # torch asks it of every module; the callers of sdaa do not
        if name != "default_generators" or name not in self.recorded["values"]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if self.state.initialised:
            self._record("default_generators", {})
            return tuple(self.state.generators)
        if self.vendor == "musa":
            raise AttributeError("set by the compiled extension at initialisation")
        return ()

    def _record(self, name: str, arguments: Mapping[str, Any]) -> None:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller != "torch" and not caller.startswith("torch."):
            self.calls.append(Call(name, dict(arguments)))

    def _function(self, name: str, text: str) -> Callable[..., Any]:
        signature = parse_signature(text)
        behaviour = getattr(self.state, name.replace(".", "_"), None)
        behaviour = behaviour or getattr(self.state, name.rpartition(".")[2], None)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            self._record(name, bound.arguments)
            if name in self.answers:
                answer = self.answers[name]
                return answer(*args, **kwargs) if callable(answer) else answer
            if behaviour is None:
                return None
            bound.apply_defaults()
            return behaviour(**bound.arguments)

        return call

    def _class(self, kind: str, methods: Mapping[str, str]) -> type[Any]:
        vendor, constructor = self, parse_signature(methods["()"])
        role = _ROLES.get(kind, _Graph if kind.endswith("Graph") else _Thing)

        def construct(this: Any, *args: Any, **kwargs: Any) -> None:
            this.arguments = dict(constructor.bind(*args, **kwargs).arguments)
            vendor._record(kind, this.arguments)
            this.vendor = vendor
            this.prepare()

        def method(name: str, signature: inspect.Signature) -> Callable[..., Any]:
            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(*args, **kwargs)
                vendor._record(f"{kind}.{name}", bound.arguments)
                behave = getattr(role, f"do_{name.strip('_')}", None)
                return behave(this, *args, **kwargs) if behave else None

            return call

        body: dict[str, Any] = {"__init__": construct}
        for name, text in methods.items():
            if name != "()":
                body[name] = method(name, parse_signature(text))
        return type(kind, (role,), body)

    def called(self, name: str) -> list[dict[str, Any]]:
        """Arguments of each call of this function."""
        return [call.arguments for call in self.calls if call.function == name]


class _HpuRandom(SimpleNamespace):
    """hpu keeps its only generator in this submodule, in a list that is there from the start."""

    @property
    def default_generators(self) -> list[torch.Generator]:
        self.vendor._record("random.default_generators", {})
        return self.vendor.state.generators[:1]


# What objects of the vendor do. `do_x` is method x, where the vendor's class has it.


class _Thing:
    vendor: FakeVendor
    arguments: dict[str, Any]

    def prepare(self) -> None:
        self.time_ms: float | None = None


class _Stream(_Thing):
    def do_query(self) -> bool:
        return True

    def do_record_event(self, event: Any = None) -> Any:
        return self.vendor.Event() if event is None else event


class _Event(_Thing):
    def do_record(self, stream: Any = None) -> None:
        self.vendor.state.clock_ms += TICK_MS
        self.time_ms = self.vendor.state.clock_ms

    def do_query(self) -> bool:
        return True

    def do_elapsed_time(self, end: Any) -> float:
        assert isinstance(end, type(self)), "elapsed_time() takes an event of the same module"
        assert self.time_ms is not None and end.time_ms is not None, "both events must be recorded"
        return end.time_ms - self.time_ms


class _Graph(_Thing):
    def do_pool(self) -> tuple[int, int]:
        return (0, 1)


class _Capture(_Thing):
    """The context manager `graph`."""

    def prepare(self) -> None:
        graph = next(iter(self.arguments.values()))
        assert isinstance(graph, _Graph), f"graph() takes a graph of the same module first, not {graph!r}"

    def do_enter(self) -> None:
        self.vendor.state.capturing = True

    def do_exit(self, *_raised: Any) -> None:
        self.vendor.state.capturing = False


_ROLES: dict[str, type[_Thing]] = {"Stream": _Stream, "Event": _Event, "graph": _Capture}


class State:
    """Two devices; the second one is current, so that what ignores the index or the current device shows.

    A method with the name of a vendor's function is what that function does, in every module that has it. Figures
    differ by one byte between the devices.
    """

    def __init__(self, vendor: FakeVendor) -> None:
        self.vendor = vendor
        self.count = 2
        self.current = 1
        self.initialised = False
        self.queued: list[Callable[[], Any]] = []
        self.generators = [torch.Generator() for _ in range(self.count)]
        self.clock_ms = 0.0
        self.capturing = False
        self.peak_is_reset: set[int] = set()
        self.registered: dict[int, tuple[int, int]] = {}
        self.stream_of: dict[int, Any] = {}
        self.seeds = [101] * self.count

    def index(self, device: Any) -> int:
        """What a vendor makes of its device argument: an index, a device, its name, or None for the current one."""
        if isinstance(device, int):
            index = device
        elif device is None:
            index = self.current
        else:
            kind, _, number = str(device).partition(":")
            if kind != self.vendor.device_type:
                raise ValueError(f"Expected a {self.vendor.device_type} device, but got: {device}")
            index = int(number) if number else self.current
        if index not in range(self.count):
            raise RuntimeError(f"invalid device ordinal {index}")
        return index

    # Devices

    def _lazy_init(self) -> None:
        self.initialised = True
        while self.queued:
            self.queued.pop(0)()

    init = _lazy_init

    def is_initialized(self) -> bool:
        return self.initialised

    def _lazy_call(self, **arguments: Any) -> None:
        (callback,) = (value for value in arguments.values() if callable(value))
        self._later(callback)

    def _later(self, callback: Callable[[], Any]) -> None:
        if self.initialised or "_lazy_call" not in self.vendor.recorded_functions:
            callback()
        else:
            self.queued.append(callback)

    def device_count(self) -> int:
        return self.count

    def is_available(self) -> bool:
        return self.count > 0

    def current_device(self) -> int:
        self._lazy_init()
        return self.current

    def set_device(self, device: Any) -> None:
        if self.vendor.vendor in ("neuron", "tpu") and isinstance(device, str):
            raise ValueError(f"Invalid device string {device}")  # they take indices and torch.devices
        self.current = self.index(device)

    def synchronize(self, device: Any = None) -> None:
        self.index(device)

    def get_device_capability(self, device: Any = None) -> Any:
        return {"architecture": 1} if self.vendor.device_type == "xpu" else (9, 0)

    def get_device_properties(self, **arguments: Any) -> Any:
        (device,) = arguments.values()
        index = self.index(device)
        if self.vendor.vendor == "hpu":
            return f"(sramBaseAddress=0x{index}, dramEnabled=1)"
        known = {
            "name": "fake",
            "major": 9,
            "minor": 0,
            "total_memory": 80 * GIB + index,
            "has_fp16": True,
            "has_fp64": False,
        }
        if self.vendor.vendor == "mtia":
            return known
        # ipex's were not recorded; torch.xpu's are those of the same driver.
        attributes = self.vendor.recorded["properties"] or (["total_memory", "has_fp16", "has_fp64"])
        return SimpleNamespace(**{name: known.get(name) for name in attributes})

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    # Random numbers

    def _generator(self, device: Any) -> torch.Generator:
        index = self.index(device)
        if self.vendor.vendor == "hpu":
            if isinstance(device, int) and device != 0:
                raise RuntimeError("only device index 0 has a generator")
            index = 0
        return self.generators[index]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        self._lazy_init()
        return self._generator(device).get_state()

    def set_rng_state(self, device: Any = None, **state: torch.Tensor) -> None:
        (new_state,) = state.values()  # vendors name it differently
        assert isinstance(new_state, torch.Tensor) and new_state.dtype == torch.uint8
        generator = self._generator(device)
        self._later(lambda: generator.set_state(new_state))

    def manual_seed(self, seed: int, device: Any = None) -> None:
        if self.vendor.vendor == "xla":
            self.seeds[self.index(device)] = seed
        self._later(lambda: self._generator(device).manual_seed(seed))

    def manual_seed_all(self, seed: int) -> None:
        self._later(lambda: [generator.manual_seed(seed) for generator in self.generators])

    def initial_seed(self) -> int:
        self._lazy_init()
        return self._generator(None).initial_seed()

    # torch_xla: the state of a device is one number, the client of each device keeps account of its memory

    def device(self, index: int | None = None) -> torch.device:
        return torch.device("xla", self.index(index))

    def core_xla_model_get_rng_state(self, device: Any = None) -> int:
        return self.seeds[self.index(device)]

    def core_xla_model_set_rng_state(self, seed: int, device: Any = None) -> None:
        self.seeds[self.index(device)] = seed

    def core_xla_model_get_memory_info(self, device: Any = None) -> dict[str, int]:
        index = self.index(device)
        return {"bytes_used": 3 * GIB + index, "bytes_limit": 80 * GIB + index}

    def runtime_device_type(self) -> str:
        return "TPU" if self.count else "CPU"

    def _get_default_mps_generator(self) -> torch.Generator:
        return self._generator(None)

    # Streams

    def current_stream(self, device: Any = None) -> Any:
        index = self.index(device)
        return self.stream_of.get(index) or self.default_stream(index)

    def default_stream(self, device: Any = None) -> Any:
        index = self.index(device)
        name = f"_default_stream_{index}"
        if name not in self.__dict__:
            setattr(self, name, SimpleNamespace(default_of=index))
        return getattr(self, name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.stream_of.get(self.current)
        self.stream_of[self.current] = stream
        yield
        self.stream_of[self.current] = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    # Memory

    def memory_allocated(self, device: Any = None) -> int:
        return 3 * GIB + self.index(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        index = self.index(device)
        return (3 if index in self.peak_is_reset else 4) * GIB + index

    def memory_reserved(self, device: Any = None) -> int:
        return (80 if self.vendor.vendor == "hpu" else 5) * GIB + self.index(device)

    def max_memory_reserved(self, device: Any = None) -> int:
        index = self.index(device)
        figure = 80 if self.vendor.vendor == "hpu" else 5 if index in self.peak_is_reset else 6
        return figure * GIB + index

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.peak_is_reset.add(self.index(device))

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        index = self.index(device)
        if self.vendor.vendor == "hpu":
            figures = {
                "Limit": 80 * GIB + index,
                "InUse": 3 * GIB + index,
                "MaxInUse": self.max_memory_allocated(index),
            }
            return {name: figures.get(name, 0) for name in self.vendor.recorded["memory_stats"]}
        return {"allocated_bytes.all.current": 3 * GIB + index}

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        index = self.index(device)
        return 70 * GIB + index, 80 * GIB + index

    def current_allocated_memory(self) -> int:
        return 3 * GIB + self.current

    def driver_allocated_memory(self) -> int:
        return 5 * GIB + self.current

    def recommended_max_memory(self) -> int:
        return 80 * GIB + self.current

    # The vendor's runtime: codes, 0 is good

    def cudart(self) -> Any:
        vendor = self.vendor
        ((runtime, functions),) = vendor.recorded["runtimes"].items()
        return SimpleNamespace(
            **{name: vendor._function(f"{runtime}.{name}", text) for name, text in functions.items()}
        )

    npurt = supart = cudart

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        self.registered[ptr] = (size, flags)
        return 0

    npuHostRegister = supaHostRegister = cudaHostRegister

    def cudaHostUnregister(self, ptr: int) -> int:
        return 0 if self.registered.pop(ptr, None) else 713

    npuHostUnregister = supaHostUnregister = cudaHostUnregister

    def check_error(self, res: int) -> None:
        if res:
            raise RuntimeError(f"runtime error {res}")


# Packages ---------------------------------------------------------------------------------------------------

_REPLACE = "import sys, fake_vendor\nsys.modules[__name__] = fake_vendor.imported({name!r})\n"
_IMPORTED = "import fake_vendor\nfake_vendor.imported({name!r})\n"

# DeepSpeed's abstract class in short, with the methods that Intel's class of today has and those of years ago.
_EXTERNAL = '''
import abc
import contextlib
import torch
import fake_vendor
_xpu = fake_vendor.imported("xpu", as_attribute=False)

class DeepSpeedAccelerator(abc.ABC):
    """The abstract methods that the old class lacks."""

{abstract}

class XPU_Accelerator(DeepSpeedAccelerator):
    def __init__(self):
        self._name = "xpu"
        self._communication_backend_name = "ccl"

    def is_synchronized_device(self): return False
    def device_name(self, device_index=None):
        return "xpu" if device_index == None else f"xpu:{{device_index}}"
    def device(self, device_index=None): return torch.device(self.device_name(device_index))
    def set_device(self, device_index): _xpu.set_device(device_index)
    def current_device(self): return _xpu.current_device()
    def current_device_name(self): return "xpu:" + str(_xpu.current_device())
    def device_count(self): return _xpu.device_count()
    def synchronize(self, device_index=None): return _xpu.synchronize(device_index)
    def is_available(self): return _xpu.is_available()
    def random(self): return torch.random
    def set_rng_state(self, new_state, device_index=None):
        if device_index == None:
            return _xpu.set_rng_state(new_state)
        return _xpu.set_rng_state(new_state, device_index)
    def get_rng_state(self, device_index=None):
        return _xpu.get_rng_state() if device_index == None else _xpu.get_rng_state(device_index)
    def manual_seed(self, seed): return _xpu.manual_seed(seed)
    def manual_seed_all(self, seed): return _xpu.manual_seed_all(seed)
    def Stream(self, device=None, priority=0, **kwargs): return _xpu.Stream(device, priority, **kwargs)
    def stream(self, stream): return _xpu.stream(stream)
    def current_stream(self, device_index=None): return _xpu.current_stream(device_index)
    @property
    def Event(self): return _xpu.Event
    def empty_cache(self): return _xpu.empty_cache()
    def memory_allocated(self, device_index=None): return _xpu.memory_allocated(device_index)
    def max_memory_allocated(self, device_index=None): return _xpu.max_memory_allocated(device_index)
    def memory_stats(self, device_index=None): return _xpu.memory_stats(device_index)
    def reset_peak_memory_stats(self, device_index=None): return _xpu.reset_peak_memory_stats(device_index)
    def memory_reserved(self, device_index=None): return _xpu.memory_reserved(device_index)
    def max_memory_reserved(self, device_index=None): return _xpu.max_memory_reserved(device_index)
    def total_memory(self, device_index=None):
        return _xpu.get_device_properties(self.current_device() if device_index is None else device_index).total_memory
    def is_bf16_supported(self): return True
    def is_fp16_supported(self): return True
    def communication_backend_name(self): return self._communication_backend_name
    def on_accelerator(self, tensor): return str(tensor.device).startswith("xpu:")
{methods}
'''
_ABSTRACT_IN_OLD = """available_memory capture_to_graph create_graph export_envs get_compile_backend
 handles_memory_backpressure is_triton_supported replay_graph resolves_data_dependency set_compile_backend
 set_visible_devices_envs supported_dtypes use_host_timers visible_devices_envs"""
_OLD = """
    def initial_seed(self, seed): return _xpu.initial_seed(seed)
    def amp(self): return _xpu.amp
    def range_push(self, msg): return
    def range_pop(self): return
    def pin_memory(self, tensor): return tensor.pin_memory(device=self.current_device_name())
    def is_pinned(self, tensor): return tensor.is_pinned(device=self.current_device_name())
    def op_builder_dir(self): return "intel_extension_for_deepspeed.op_builder"
"""
_COMPLETE = """
    def initial_seed(self): return _xpu.initial_seed()
    def range_push(self, msg, domain=None, category=None): return
    def range_pop(self, domain=None): return
    def pin_memory(self, tensor, make_copy=True, match_shape=True): return tensor.pin_memory()
    def is_pinned(self, tensor): return tensor.is_pinned()
    def available_memory(self, device_index=None):
        return self.total_memory(device_index) - self.memory_allocated(device_index)
    def use_host_timers(self): return self.is_synchronized_device()
    def resolves_data_dependency(self): return self.is_synchronized_device()
    def handles_memory_backpressure(self): return self.is_synchronized_device()
    def supported_dtypes(self): return [torch.float, torch.half, torch.bfloat16]
    def is_triton_supported(self): return False
    def create_graph(self): return None
    def capture_to_graph(self, graph, pool=None, stream=None): return contextlib.nullcontext()
    def replay_graph(self, graph): return
    def export_envs(self): return []
    def visible_devices_envs(self): return ["ZE_AFFINITY_MASK"]
    def set_visible_devices_envs(self, current_env, local_accelerator_ids):
        for env in self.visible_devices_envs():
            current_env[env] = ",".join(map(str, local_accelerator_ids))
    def get_compile_backend(self): return "inductor"
    def set_compile_backend(self, backend): return
"""


def _external(abstract: str, methods: str) -> str:
    lines = [f"    @abc.abstractmethod\n    def {name}(self, *args): ..." for name in abstract.split()]
    return _EXTERNAL.format(abstract="\n".join(lines), methods=methods)


# Package files of what can be installed; the names of parts of torch have none.
PACKAGES: dict[str, dict[str, str]] = {
    **{
        name: {f"{package}/__init__.py": _IMPORTED.format(name=name)}
        for name in SPARE_TYPES
        for _, package in VENDORS[name].backends.values()
    },
    "xla": {
        "torch_xla/__init__.py": _REPLACE.format(name="xla") + "sys.modules[__name__].__path__ = __path__\n",
        "torch_xla/distributed/__init__.py": "",
        "torch_xla/distributed/xla_backend.py": "",
    },
    "klxpu": {"torch_xmlir/__init__.py": "# what it does to torch.cuda is done by installed()\n"},
    **{
        name: {
            "habana_frameworks/__init__.py": "",
            "habana_frameworks/torch/__init__.py": "",
            "habana_frameworks/torch/core.py": "",
            "habana_frameworks/torch/hpu/__init__.py": _REPLACE.format(name=name),
            "habana_frameworks/torch/utils/__init__.py": "",
            "habana_frameworks/torch/utils/experimental.py": "def _is_fp16_supported():\n    return True\n",
        }
        for name in ("hpu", "hpu.eager")
    },
    **{
        name: {
            "intel_extension_for_pytorch/__init__.py": '__version__ = "2.8.10+xpu"\n'
            + "from types import SimpleNamespace\n_C = SimpleNamespace(_has_xpu=lambda: True)\n",
            "intel_extension_for_pytorch/xpu/__init__.py": "",
            "intel_extension_for_pytorch/xpu/cpp_extension.py": "class DpcppBuildExtension:\n    pass\n",
        }
        for name in ("xpu.ipex", "xpu.ipex.older")
    },
    "xpu.external": {"intel_extension_for_deepspeed/__init__.py": _external("", _COMPLETE)},
    "xpu.external.older": {"intel_extension_for_deepspeed/__init__.py": _external(_ABSTRACT_IN_OLD, _OLD)},
}
# Which surface torch's module shows, by what is installed. IPEX of today leaves torch.xpu as torch has it; older
# ones put their own in its place.
SURFACES = {
    "klxpu": "cuda",
    "hpu.eager": "hpu",
    "cuda.rocm": "cuda",
    "xpu.native": "xpu",
    "xpu.ipex": "xpu",
    "xpu.ipex.older": "ipex",
    "xpu.external": "xpu",
    "xpu.external.older": "xpu",
}
_LIVE: dict[str, FakeVendor] = {}


def surface(name: str) -> str:
    """The file in tests/data/vendor_api for what is installed under this name."""
    return SURFACES.get(name, name)


def imported(name: str, as_attribute: bool = True) -> FakeVendor:
    """The module of a vendor, as its package makes it at import: also an attribute of torch."""
    kind = surface(name)
    if kind not in _LIVE:
        _LIVE[kind] = FakeVendor(kind, lazy=os.environ.get("PT_HPU_LAZY_MODE", "1") != "0")
    if as_attribute:
        setattr(torch, _LIVE[kind].device_type, _LIVE[kind])
    return _LIVE[kind]


def write_package(folder: Path, name: str) -> None:
    """Write the package that brings this vendor into a folder that is, or will be, on the path."""
    for path, text in PACKAGES.get(name, {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def _part_of_torch(stack: ExitStack, name: str, module: FakeVendor) -> None:
    """Make torch look like a build with this device. torch.cuda and torch.xpu stay: torch's own code calls them."""
    from anyaccel.accelerator import torch_device

    find_module, dotted = torch_device.find_module, module.__name__
    stack.enter_context(
        mock.patch.object(torch_device, "find_module", lambda name: module if name == dotted else find_module(name))
    )
    if name == "cuda":
        stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        stack.enter_context(mock.patch.object(torch.version, "hip", None))
    elif name == "cuda.rocm":
        stack.enter_context(mock.patch.object(torch.version, "cuda", None))
        stack.enter_context(mock.patch.object(torch.version, "hip", "6.3"))
    elif name == "xpu.native":
        stack.enter_context(mock.patch.object(torch.version, "xpu", "20250101"))
    elif name == "mps":
        stack.enter_context(mock.patch.object(torch, "mps", module))
        stack.enter_context(mock.patch.object(torch.backends.mps, "is_built", lambda: True))
        stack.enter_context(mock.patch.object(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True))
    elif name == "mtia":
        stack.enter_context(mock.patch.object(torch.mtia, "_is_compiled", lambda: True))


@contextmanager
def on_path(folder: str) -> Iterator[None]:
    """Packages in this folder can be imported. What others do to the path in the meantime stays."""
    sys.path.insert(0, folder)
    yield
    if folder in sys.path:
        sys.path.remove(folder)


@contextmanager
def installed(name: str, folder: Path | None = None) -> Iterator[FakeVendor]:
    """As if the software of this vendor were installed and two of its devices were there.

    Args:
        name: key of PACKAGES, or a part of torch.
        folder: where the package is, or is to be; a temporary one without.
    """
    modules, attributes = set(sys.modules), set(torch.__dict__)
    package = PACKAGES.get(name)
    with ExitStack() as stack:
        _LIVE.clear()
        if name.startswith("hpu"):
            lazy = "0" if name == "hpu.eager" else "1"
            stack.enter_context(mock.patch.dict(os.environ, {"PT_HPU_LAZY_MODE": lazy}))
        if package:
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anyaccel-vendor-")))
            if not any(folder.iterdir()):
                write_package(folder, name)
                importlib.invalidate_caches()
            stack.enter_context(on_path(str(folder)))
        device_module = imported(name, as_attribute=False)
        if not package or name.startswith(("xpu", "klxpu")):
            _part_of_torch(stack, name, device_module)
        try:
            yield device_module
        finally:
            _LIVE.clear()
            tops = {re.split(r"[/.]", path)[0] for path in package or ()}
            for loaded in set(sys.modules) - modules:
                if loaded.split(".")[0] in tops:
                    del sys.modules[loaded]
            if device_module.device_type not in attributes:
                torch.__dict__.pop(device_module.device_type, None)
