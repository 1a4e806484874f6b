# SPDX-License-Identifier: Apache-2.0
"""The conformance kit passes what is right, and each of its checks finds an accelerator that is wrong in its respect.

The CPU is right; so is `Queue`, which has real queues on top of it, and `Bare`, which has next to nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from anyaccel.accelerator import select
from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.accelerator.base import Accelerator, DeviceProperties, TypedTensor
from anyaccel.accelerator.conformance import processes, run
from anyaccel.accelerator.conformance.checking import CHECKS, Check, ConformanceError, expect, expect_error
from anyaccel.accelerator.conformance.run import Result, run_check, run_checks, select_checks, uncovered_methods
from anyaccel.accelerator.spec import METHODS_OF, BackendSpec, Capabilities, Capability, CollectiveBackend, Unavailable
from anyaccel.errors import CapabilityError
from recorded_graph import RecordedGraph

MIB = 1 << 20
BY_ID = {check.id: check for check in CHECKS}


def builders(**classes: Any) -> str:
    """A module with these op builders."""
    module = ModuleType(f"test_builders_{len(sys.modules)}")
    vars(module).update(classes)
    sys.modules[module.__name__] = module
    return module.__name__


class Builder:
    NAME = "test"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def why_not(self) -> str:
        return ""

    def load(self, verbose: bool = False) -> Any:
        return self


class BuilderWithReason(Builder):
    def is_compatible(self, verbose: bool = False) -> bool:
        return False

    def why_not(self) -> str:
        return "it is a test"


class CPU(CpuAccelerator):
    """The live CPU, without the ops that it may have to compile."""

    spec = dataclasses.replace(CpuAccelerator.spec, op_builders=builders(One=Builder, Two=BuilderWithReason))


# An accelerator with queues -----------------------------------------------------------------------------------


class Deferred(TorchFunctionMode):
    """Notes what is called, which must write into memory that is there, instead of doing it."""

    def __init__(self, noted: list[Callable[[], object]]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.noted.append(functools.partial(func, *args, **kwargs))
        return kwargs.get("out", args[0])


class FakeStream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.queue: list[Callable[[], object]] = []
        QUEUES.append(self)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def query(self) -> bool:
        return not self.queue

    def wait_stream(self, other: FakeStream) -> None:
        other.synchronize()

    def record_event(self, event: Any = None) -> Any:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


QUEUES: list[FakeStream] = []
CURRENT = [FakeStream()]


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.stream = stream or CURRENT[-1]
        self.time = 0.0
        self.stream.queue.append(self._reach)

    def _reach(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return self.time > 0

    def synchronize(self) -> None:
        while not self.time:
            self.stream.queue.pop(0)()

    def wait(self, stream: Any = None) -> None:
        self.synchronize()

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.time - self.time) * 1e3


class Queue(CPU):
    """The CPU's tensors, two devices of one index to torch, real queues, graphs and host registration."""

    spec = dataclasses.replace(
        CPU.spec,
        name="queue",
        visible_devices=("ANYACCEL_TEST_DEVICES",),
        capabilities=Capabilities(absent={Capability.PINNED_MEMORY: "it is a test"}),
    )
    index = 0
    capturing = False

    def device_count(self) -> int:
        return len(os.environ.get("ANYACCEL_TEST_DEVICES", "0,1").split(","))

    def current_device(self) -> int:
        return self.index

    def set_device(self, device_index: Any) -> None:
        self.index = device_index

    def synchronize(self, device_index: Any = None) -> None:
        for stream in QUEUES:
            stream.synchronize()

    Stream = property(lambda self: FakeStream)
    Event = property(lambda self: FakeEvent)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:  # type: ignore[override]
        with Deferred(stream.queue) if stream else contextlib.nullcontext():
            CURRENT.append(stream or CURRENT[-1])
            yield
            CURRENT.pop()

    def current_stream(self, device_index: Any = None) -> Any:
        return CURRENT[-1]

    def create_graph(self) -> Any:
        return RecordedGraph()

    @contextlib.contextmanager
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[Any]:  # type: ignore[override]
        self.capturing = True
        with graph.capture():
            yield
        self.capturing = False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        return True

    def unregister_host_memory(self, address: int) -> None:
        return


class Bare(Accelerator):
    """The four methods that a backend must bring."""

    spec = BackendSpec(
        name="bare",
        device_type="cpu",
        torch_module="torch.cpu",
        capabilities=Capabilities(absent={Capability.PINNED_MEMORY: "it is a test"}),
    )

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device_index: Any) -> None:
        return

    def synchronize(self, device_index: Any = None) -> None:
        return


class OneQueue(Queue):
    """Declares that it has no streams, and hands out its only queue as one: that works, so it is fine."""

    spec = dataclasses.replace(
        Queue.spec,
        capabilities=Capabilities(absent={Capability.STREAMS: "one queue", Capability.PINNED_MEMORY: "test"}),
    )


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOCAL_RANK", "LOCAL_SIZE", "ANYACCEL_TEST_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert len(CURRENT) == 1
    QUEUES[1:] = []


def left_there(self: Accelerator, device_index: Any) -> Any:
    """A guard that does not go back."""
    if device_index is not None:
        self.set_device(device_index)
    return contextlib.nullcontext()


# What is right passes -----------------------------------------------------------------------------------------


@functools.cache
def right(kind: type[Accelerator]) -> dict[str, Result]:
    """The results of all checks; in real child processes for the CPU only."""
    with pytest.MonkeyPatch.context() as patch:
        if kind is not CPU:
            patch.setattr(processes, "_ask_child", without_children)
        return {check.id: run_check(check, kind()) for check in CHECKS}


def without_children(code: str, *_asked: Any) -> Any:
    """The answer of a child process, without the seconds that it takes to start."""
    return 1 if "device_count" in code else torch.arange(8.0).tolist()


@pytest.mark.parametrize("kind", [CPU, Queue, Bare])
def test_what_is_right_does_not_fail(kind: type[Accelerator]) -> None:
    assert {name: result.detail for name, result in right(kind).items() if result.outcome == "fail"} == {}
    assert all(result.detail for result in right(kind).values() if result.outcome == "absent")
    assert all(result.seconds > 0 and not result.traceback for result in right(kind).values())


def test_only_what_is_absent_is_absent() -> None:
    def absent(kind: type[Accelerator]) -> set[str]:
        return {name for name, result in right(kind).items() if result.outcome == "absent"}

    registration = "host_memory-existing_memory_is_registered_and_released"
    children = "processes-a_child_sees_just_the_devices_it_is_given"
    assert absent(CPU) == {registration, children}
    assert absent(Queue) == set()
    assert {BY_ID[name].subject for name in absent(Bare)} == {
        "random numbers", "streams", "events", "graphs", "memory", "host memory", "processes", "op builders",
    }  # fmt: skip
    reason = "does nothing here: operations on a CPU are complete when they return"
    assert right(CPU)["streams-a_stream_waits_for_another"].detail == reason


def test_the_only_queue_of_a_device_may_be_its_stream() -> None:
    results = [run_check(check, OneQueue()) for check in CHECKS if check.subject in ("streams", "events")]
    assert [(result.outcome, result.detail) for result in results[:4]] == [("pass", "does nothing here: one queue")] * 4
    assert {result.outcome for result in results} == {"pass"}


# What is wrong fails ------------------------------------------------------------------------------------------


class Wrong(NamedTuple):
    check: str
    why: str  # a part of the message
    kind: type[Accelerator]
    changes: dict[str, Any]


def wrong(check: str, why: str, kind: type[Accelerator] = CPU, **changes: Any) -> Any:
    """An accelerator of this kind with these methods; a value that is not callable is what the method returns.

    The check is given by as much of its id as tells it from the others.
    """
    (check_id,) = (name for name in BY_ID if name.startswith(check))
    fixed = {
        name: change
        if callable(change) or isinstance(change, property | classmethod | BackendSpec)
        else functools.partialmethod(lambda self, change, *_args, **_kwargs: change, change)
        for name, change in changes.items()
    }
    return pytest.param(Wrong(check_id, why, kind, fixed), id=f"{check}-{'-'.join(changes)}-{why}".replace(" ", "_"))


def nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def raises(*_args: Any, **_kwargs: Any) -> Any:
    raise ZeroDivisionError("the driver says no")


def kib(name: str) -> Callable[..., int]:
    """The CPU's figure in the wrong unit."""
    return lambda self, device_index=None: int(getattr(CpuAccelerator, name)(self, device_index)) >> 10


def standing_still(*_args: Any) -> int:
    return 1 << 30


def with_capabilities(kind: type[Accelerator], **absent: str) -> BackendSpec:
    capabilities = Capabilities(absent={Capability[name].value: reason for name, reason in absent.items()})
    return dataclasses.replace(kind.spec, capabilities=capabilities)


class DeafStream(FakeStream):
    """Waits for nobody."""

    synchronize = wait_stream = wait_event = nothing

    def query(self) -> bool:
        return True


class DeafEvent(FakeEvent):
    synchronize = wait = nothing

    def query(self) -> bool:
        return True


class HalfEvent(FakeEvent):
    """Measures seconds."""

    def elapsed_time(self, end: FakeEvent) -> float:
        return super().elapsed_time(end) / 1e3


class NeverEvent(FakeEvent):
    def query(self) -> bool:
        return False


class IgnoredGraph(RecordedGraph):
    replay = nothing


def blames_another(*_args: Any) -> None:
    raise CapabilityError("another", "peak_memory", "none")


def pins_float32(self: CpuAccelerator, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return CPU.pin_empty(self, *size, dtype=torch.float32)


def pins_anywhere(self: Any, tensor: torch.Tensor, device: str = "cpu", dtype: Any = None) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype)


def takes_any_backend(self: Any, backend: str) -> None:
    self._compile_backend = backend


def knows_every_name(self: CpuAccelerator, name: str) -> bool:
    return name in set(Capability) and CPU.has(self, name)


@contextlib.contextmanager
def runs_at_once(self: Any, graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
    yield


class BuilderWithoutReason(Builder):
    def is_compatible(self, verbose: bool = False) -> bool:
        return False


class BuilderWithoutOp(Builder):
    load = nothing


class BuilderThatBreaks(Builder):
    def load(self, verbose: bool = False) -> Any:
        raise CapabilityError("cpu", "test", "no compiler")


def from_package(package: str) -> BackendSpec:
    return dataclasses.replace(CPU.spec, op_builders=package)


WRONG = [
    # identity
    wrong("identity-the_device", "of type bool", is_available=1),
    wrong("identity-the_device", "is_available() True", is_available=False),
    wrong("identity-the_device", "of type int", device_count=1.0),
    wrong("identity-the_device", "1 or more", device_count=0),
    wrong("identity-the_device", "probe()", probe=classmethod(lambda cls: Unavailable("no", False))),
    wrong("identity-the_device", "raised ZeroDivisionError: the driver says no", device_count=raises),
    wrong("identity-device", "of type str", device_name=torch.device("cpu")),
    wrong("identity-device", "raised RuntimeError", device_name="warp"),
    wrong("identity-device", "have type", device_name="meta"),
    wrong("identity-device", "of type device", device="cpu"),
    wrong("identity-device", "index", current_device_name="cpu:1"),
    wrong("identity-set_device", "of type int", current_device="cpu"),
    wrong("identity-set_device", "of type int", current_device=True),
    wrong("identity-set_device", "0 or more", current_device=-1),
    wrong(
        "identity-set_device",
        "after set_device(1), current_device() 1",
        Queue,
        device_name=lambda self, index=None: "cpu" if index is None else f"cpu:{index}",
        set_device=nothing,
    ),
    wrong("identity-tensors", "of type bool", on_accelerator=nothing),
    wrong("identity-tensors", "on_accelerator() True", on_accelerator=False),
    wrong("identity-tensors", "on meta False", on_accelerator=True),
    wrong("identity-tensors", "device type", device_name="meta", device=torch.device("cpu")),
    wrong("identity-synchronize", "return None", synchronize=True),
    wrong("identity-a_guard", "current_device() 0", Queue, device_guard=left_there),
    # declaration
    wrong("declaration-the_spec", "spec.torch_module", spec=dataclasses.replace(CPU.spec, torch_module="")),
    wrong("declaration-the_spec", "api_version", spec=dataclasses.replace(CPU.spec, api_version=99)),
    wrong("declaration-has_answers", "of type bool", has=lambda self, name: str(name)),
    wrong("declaration-has_answers", "declared absent", has=True),
    wrong("declaration-has_answers", "ValueError", has=knows_every_name),
    wrong("declaration-policies", "of type bool", use_host_timers=nothing),
    wrong("declaration-policies", "as declared", is_synchronized_device=False),
    wrong("declaration-policies", "resolves_data_dependency() True", resolves_data_dependency=False),
    wrong("declaration-copies", "copy.copy()", __copy__=lambda self: CPU()),
    wrong("declaration-copies", "copy.deepcopy()", __deepcopy__=lambda self, memo: CPU()),
    wrong("declaration-copies", "raised", __reduce__=raises),
    # random numbers
    wrong("random_numbers-random", "a module", random=torch.random.fork_rng),
    wrong("random_numbers-random", "fork_rng", random=sys),
    wrong("random_numbers-a_state", "what was set", set_rng_state=nothing),
    wrong("random_numbers-a_state", "a tensor", get_rng_state=b"state"),
    wrong("random_numbers-a_state", "torch.uint8", get_rng_state=torch.zeros(8)),
    wrong(
        "random_numbers-a_state",
        "the same numbers",
        get_rng_state=torch.Generator().get_state(),
        set_rng_state=nothing,
    ),
    wrong("random_numbers-the_states", "the number of states", get_rng_state_all=[]),
    wrong("random_numbers-the_states", "the same numbers", set_rng_state_all=nothing),
    wrong("random_numbers-a_seed", "initial_seed() 7", manual_seed=nothing),
    wrong("random_numbers-a_seed", "same numbers", manual_seed=nothing, initial_seed=7),
    wrong("random_numbers-a_seed", "other numbers", manual_seed=lambda self, seed: CPU.manual_seed(self, 7)),
    wrong("random_numbers-a_seed", "of type int", initial_seed=7.0),
    wrong("random_numbers-manual", "same numbers", manual_seed_all=nothing),
    wrong("random_numbers-default", "a torch.Generator", default_generator=0),
    wrong(
        "random_numbers-default",
        "initial_seed() 21",
        default_generator=torch.Generator(),
    ),
    # streams, events, graphs
    wrong("streams-a_stream_waits", "old values", Queue, Stream=property(lambda self: DeafStream)),
    wrong("streams-a_stream_waits", "raised TypeError", Stream=property(nothing)),
    wrong("streams-a_stream_is", "old values", Queue, Stream=property(lambda self: DeafStream)),
    wrong("streams-synchronize", "old values", Queue, synchronize=nothing),
    wrong("streams-stream", "raised TypeError", stream=nothing),
    wrong("streams-stream", "with the method wait_stream", current_stream=nothing),
    wrong("streams-stream", "inside stream(side)", Queue, stream=lambda self, stream: contextlib.nullcontext()),
    wrong("streams-stream", "default_stream() with the method", default_stream=nothing),
    wrong("streams-stream", "objects that do nothing", stream=lambda self, stream: self._lacks("streams")),
    wrong("events-a_stream", "old values", Queue, Event=property(lambda self: DeafEvent)),
    wrong("events-the_host", "query() True", Queue, Event=property(lambda self: NeverEvent)),
    wrong("events-elapsed", "milliseconds", Queue, Event=property(lambda self: HalfEvent)),
    wrong("graphs-a_replay", "replay_graph(), the result 10.0", Queue, create_graph=lambda self: IgnoredGraph()),
    wrong("graphs-a_replay", "after the capture, the result 0.0", Queue, capture_to_graph=runs_at_once),
    wrong("graphs-a_replay", "to return a graph", create_graph=nothing),
    wrong("graphs-a_replay", "return None", replay_graph=0),
    wrong("graphs-a_tiny", "tokens of a tiny decoder", Queue, create_graph=lambda self: IgnoredGraph()),
    wrong("graphs-is_current", "within a capture", Queue, is_current_stream_capturing=False),
    wrong("graphs-is_current", "outside a capture", is_current_stream_capturing=True),
    # memory
    wrong("memory-memory_allocated", "to grow", memory_allocated=kib("memory_allocated")),
    wrong("memory-memory_allocated", "to grow", memory_allocated=standing_still),
    wrong("memory-memory_allocated", "of type int", memory_allocated=1e9),
    wrong(
        "memory-memory_allocated",
        "to shrink",
        memory_allocated=lambda self, index=None: CPU.max_memory_allocated(self),
        __init__=lambda self: (CPU.__init__(self), CPU.reset_peak_memory_stats(self), None)[-1],
    ),
    wrong("memory-memory_reserved", "at least", memory_reserved=MIB),
    wrong("memory-memory_reserved", "at least", memory_reserved=65 * MIB),
    wrong("memory-empty_cache", "return None", empty_cache=True),
    wrong("memory-the_peak_rises", "max_memory_allocated()", reset_peak_memory_stats=nothing),
    wrong("memory-the_peak_rises", "to grow", max_memory_allocated=kib("max_memory_allocated")),
    wrong("memory-the_peak_rises", "to stay", max_memory_allocated=CPU.memory_allocated),
    wrong("memory-the_deprecated_resets", "max_memory_allocated()", reset_max_memory_cached=nothing),
    wrong("memory-the_deprecated_resets", "max_memory_allocated()", reset_max_memory_allocated=nothing),
    wrong("memory-the_peak_of", "at least", max_memory_reserved=0),
    wrong("memory-the_deprecated_names", "memory_cached", memory_cached=kib("memory_reserved")),
    wrong("memory-the_deprecated_names", "max_memory_cached", max_memory_cached=0),
    wrong("memory-memory_stats", "of type dict", memory_stats=[]),
    wrong("memory-memory_stats", "names as keys", memory_stats={1: 2}),
    wrong("memory-memory_stats", "about as", memory_stats={"allocated_bytes.all.current": 1}),
    wrong("memory-total_memory", "at least", total_memory=23 << 20),
    wrong("memory-total_memory", "at least", total_memory=70 * MIB),
    wrong("memory-total_memory", "of type int", total_memory="23 GiB"),
    wrong("memory-device_properties", "a name", device_properties=DeviceProperties("", 1)),
    wrong("memory-device_properties", "total_memory", device_properties=DeviceProperties("a device", 1)),
    wrong("memory-the_capability", "of type tuple", device_capability=[9, 0]),
    wrong("memory-the_capability", "the types", device_capability=("9", 0)),
    wrong("memory-free_memory", "bytes free", mem_get_info=(2, 1)),
    wrong("memory-the_summary", "of type str", memory_summary={}),
    wrong("memory-the_summary", "a text", memory_summary=""),
    wrong("memory-available", "to shrink", available_memory=standing_still),
    wrong("memory-available", "from 0 to", available_memory=-1),
    wrong("memory-available", "from 0 to", available_memory=1 << 60),
    # data types
    wrong("data_types-dtypes", "start with", supported_dtypes=[torch.bfloat16, torch.float32]),
    wrong("data_types-dtypes", "of type list", supported_dtypes=(torch.float32,)),
    wrong("data_types-dtypes", "of torch.dtype", supported_dtypes=["float32"]),
    wrong("data_types-dtypes", "is_bf16_supported()", supported_dtypes=[torch.float32]),
    wrong("data_types-dtypes", "of type bool", is_bf16_supported=1),
    wrong("data_types-dtypes", "has('fp64')", is_fp64_supported=False),
    wrong("data_types-every_claimed", "raised", supported_dtypes=[torch.float32, torch.float8_e4m3fn]),
    wrong("data_types-typed_tensors", "a tensor", FloatTensor=property(lambda self: lambda *sizes: list(sizes))),
    wrong(
        "data_types-typed_tensors",
        "of dtype",
        HalfTensor=property(lambda self: TypedTensor(torch.float32, "cpu")),
    ),
    wrong(
        "data_types-typed_tensors",
        "LongTensor(2, 3) on",
        LongTensor=property(lambda self: TypedTensor(torch.int64, "meta")),
    ),
    wrong("data_types-triton", "of type bool", is_triton_supported="no"),
    wrong("data_types-triton", "without Triton", prefer_triton_grouped_mm=True),
    # host memory
    wrong("host_memory-pin_memory", "a tensor", pin_memory=nothing),
    wrong("host_memory-pin_memory", "contents of t", pin_memory=torch.zeros(50, 100)),
    wrong("host_memory-pin_memory", "is_pinned()", is_pinned=True),
    wrong("host_memory-pin_memory", "is_pinned", spec=with_capabilities(CPU), pin_memory=lambda self, t, *_a, **_k: t),
    wrong("host_memory-pin_memory", "return None", unpin_memory=True),
    wrong("host_memory-pin_empty", "of dtype", pin_empty=pins_float32),
    wrong("host_memory-pin_empty", "UsageError", pin_empty_like=pins_anywhere),
    wrong("host_memory-the_alignment", "power of two", pin_memory_alignment=0),
    wrong("host_memory-the_alignment", "power of two", pin_memory_alignment=4097),
    wrong("host_memory-the_alignment", "of type int", pin_memory_alignment=nothing),
    wrong("host_memory-existing", "register_host_memory() of an absent capability", register_host_memory=nothing),
    wrong("host_memory-existing", "AttributeError", unregister_host_memory=lambda self, address: self.runtime),
    wrong("host_memory-existing", "return True", Queue, register_host_memory=nothing),
    wrong("host_memory-existing", "return None", Queue, unregister_host_memory=0),
    # environment, compilation, profiling
    wrong("environment-export", "of type list", export_envs=("CCL",)),
    wrong("environment-export", "list of strings", export_envs=[b"CCL"]),
    wrong("environment-export", "without '='", export_envs=["CCL=1"]),
    wrong("environment-visible", "of type list", visible_devices_envs="NAME"),
    wrong("environment-visible", "to make it", Queue, set_visible_devices_envs=nothing),
    wrong("environment-visible", "return None", set_visible_devices_envs=True),
    wrong("environment-runtime", "of type dict", runtime_versions=nothing),
    wrong("environment-runtime", "names and texts", runtime_versions={"driver": 5}),
    wrong("compilation-the_compile", "of type str", get_compile_backend=nothing),
    wrong("compilation-the_compile", "UsageError", set_compile_backend=takes_any_backend),
    wrong("compilation-the_compile", "'warp'", spec=dataclasses.replace(CPU.spec, compile_backend="warp")),
    wrong("compilation-build_extension", "a subclass", build_extension=object),
    wrong("compilation-build_extension", "a subclass", build_extension=nothing),
    wrong("profiling-ranges", "raised ZeroDivisionError", range_pop=raises),
    wrong("profiling-ranges", "return None", range_push=1),
    wrong("profiling-lazy_call", "many times: 1", lazy_call=nothing),
    # processes
    wrong("processes-a_child", "got 2", Queue, set_visible_devices_envs=nothing),
    wrong("processes-a_process", "exit code 1", communication_backend_name="no_such_backend"),
    wrong("processes-a_process", "of type str", communication_backend_name=nothing),
    wrong("processes-a_process", "not empty", communication_backend_name=""),
    # op builders
    wrong("op_builders-every_builder", "raised ModuleNotFoundError", op_builder_dir="no.such.package"),
    wrong(
        "op_builders-every_builder", "get_op_builder", spec=from_package(builders(B=Builder)), get_op_builder=nothing
    ),
    wrong(
        "op_builders-every_builder", "an instance", spec=from_package(builders(B=Builder)), create_op_builder=nothing
    ),
    wrong("op_builders-every_builder", "a reason", spec=from_package(builders(B=BuilderWithoutReason))),
    wrong("op_builders-every_builder", "return the op", spec=from_package(builders(B=BuilderWithoutOp))),
    wrong("op_builders-every_builder", "no compiler", spec=from_package(builders(B=BuilderThatBreaks))),
    wrong("op_builders-an_unknown", "None", get_op_builder=lambda self, name: Builder),
    wrong("op_builders-an_unknown", "returned", create_op_builder=nothing),
    # What is absent must say so with the one error.
    wrong(
        "graphs-a_replay",
        "it returned",
        Bare,
        spec=with_capabilities(Bare, PINNED_MEMORY="test", GRAPHS="none"),
        create_graph=nothing,
        capture_to_graph=nothing,
    ),
    wrong("random_numbers-a_seed", "it returned", spec=with_capabilities(CPU, RNG="none")),
    wrong(
        "memory-memory_stats",
        "ZeroDivisionError",
        spec=with_capabilities(CPU, MEMORY_STATS="none"),
        memory_allocated=raises,
    ),
    wrong(
        "memory-the_peak_rises",
        "name the accelerator",
        spec=with_capabilities(CPU, PEAK_MEMORY="none"),
        **dict.fromkeys(METHODS_OF[Capability.PEAK_MEMORY], blames_another),
    ),
    wrong(
        "memory-memory_stats",
        "does not declare",
        memory_stats=lambda self, index=None: self._lacks("memory_stats", "lazy"),
    ),
]


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_fails(case: Wrong) -> None:
    kind = type("Broken", (case.kind,), case.changes)
    # What a child process imports is the accelerator without its mistake.
    kind.__module__, kind.__qualname__ = case.kind.__module__, case.kind.__qualname__
    before = right(case.kind)
    result = run_check(BY_ID[case.check], kind())
    assert (result.outcome, case.why in result.detail) == ("fail", True), result.detail
    assert "Error" in result.traceback
    assert before[case.check].outcome != "fail"


def test_every_check_can_fail() -> None:
    assert {case.values[0].check for case in WRONG} == set(BY_ID)


@pytest.mark.parametrize("operation", ["add", "matmul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dtype_that_is_computed_in_another_is_found(
    operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(torch, operation)
    lower = {torch.float32: torch.bfloat16, torch.float64: torch.float32}

    def emulated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return real(a.to(lower[dtype]), b.to(lower[dtype])).to(dtype) if a.dtype is dtype else real(a, b)

    monkeypatch.setattr(torch, operation, emulated)
    result = run_check(BY_ID["data_types-every_claimed_dtype_computes"], CPU())
    assert result.outcome == "fail"
    assert f"{operation} in {dtype} with a relative error" in result.detail


# The kit itself -----------------------------------------------------------------------------------------------


def test_every_method_is_covered_and_every_covered_name_exists() -> None:
    assert uncovered_methods() == set()
    assert {name for check in CHECKS for name in check.methods} <= set(vars(Accelerator))
    assert len(BY_ID) == len(CHECKS)
    assert {check.subject for check in CHECKS} >= {"identity", "memory", "streams", "events", "graphs"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_what_a_check_covers_it_calls(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()

    class Recorder(Queue):
        def __getattribute__(self, name: str) -> Any:
            called.add(name)
            return super().__getattribute__(name)

        @classmethod
        def probe(cls) -> None:
            called.add("probe")

    Recorder.__qualname__ = Queue.__qualname__  # that of a local class says that a child cannot import it
    monkeypatch.setattr(processes, "_ask_child", without_children)
    assert run_check(check, Recorder()).outcome == "pass"
    assert set(check.methods) <= called


def tensor_bytes() -> int:
    """What this process's tensors hold; of its resident memory, the allocator keeps some of what was freed."""
    gc.collect()
    return sum(each.nbytes for each in gc.get_objects() if isinstance(each, torch.Tensor))


def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ask_child", without_children)
    accelerator = Queue()
    accelerator.set_device(1)
    accelerator.set_compile_backend("eager")
    torch.manual_seed(3)
    state, environment, threads = torch.get_rng_state(), dict(os.environ), torch.get_num_threads()
    affinity = os.sched_getaffinity(0)
    before = tensor_bytes()
    results = run_checks(accelerator)
    assert {result.outcome for result in results} == {"pass"}
    assert torch.equal(torch.get_rng_state(), state)
    assert (accelerator.current_device(), accelerator.get_compile_backend()) == (1, "eager")
    assert (dict(os.environ), torch.get_num_threads(), os.sched_getaffinity(0)) == (environment, threads, affinity)
    assert tensor_bytes() == before


def test_a_check_that_fails_leaves_it_as_it_was_too() -> None:
    def broken(accelerator: Accelerator) -> None:
        torch.manual_seed(5)
        accelerator.set_device(1)
        raise SystemExit("the driver ends the process")

    accelerator, state = Queue(), torch.get_rng_state()
    result = run_check(Check("test", "a broken one", (), frozenset(), broken), accelerator)
    assert (result.outcome, result.detail) == ("fail", "raised SystemExit: the driver ends the process")
    assert accelerator.current_device() == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_an_interrupt_is_not_a_result() -> None:
    def interrupted(accelerator: Accelerator) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_check(Check("test", "interrupted", (), frozenset(), interrupted), CPU())


def test_checks_are_selected_by_name_and_method() -> None:
    assert select_checks() == select_checks("") == CHECKS
    assert {check.subject for check in select_checks("Random Numbers")} == {"random numbers"}
    assert [check.id for check in select_checks("lazy_call")] == ["profiling-lazy_call_calls_once"]
    assert select_checks("no such text") == []
    assert [result.check for result in run_checks(CPU(), only="lazy call")] == ["lazy call calls once"]


def test_a_pickle_is_loaded_where_the_accelerator_is_the_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = CPU()
    monkeypatch.setattr(select, "_accelerator", accelerator)
    monkeypatch.setattr("pickle.loads", lambda data: CPU())
    result = run_check(BY_ID["declaration-copies_are_the_accelerator"], accelerator)
    assert "a pickle to be loaded as the same object" in result.detail


def test_a_child_that_does_not_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "DEADLINE_S", 0.2)
    result = run_check(BY_ID["processes-a_process_group_reduces_a_tensor"], CPU())
    assert result.outcome == "fail"
    assert "within 0.2 s" in result.detail


def test_devices_are_counted_in_a_child_within_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    check = BY_ID["processes-a_child_sees_just_the_devices_it_is_given"]
    monkeypatch.setenv("ANYACCEL_TEST_DEVICES", "2")
    assert run_check(check, Queue()).detail == "there is only one device, so none can be hidden"
    monkeypatch.setenv("ANYACCEL_TEST_DEVICES", "5,7")
    asked: list[Any] = []
    monkeypatch.setattr(processes, "_ask_child", lambda code, what, environment: asked.append(environment) or 1)
    assert run_check(check, Queue()).outcome == "pass"
    assert asked == [{"ANYACCEL_TEST_DEVICES": "5"}]


def test_little_memory_is_said_instead_of_used() -> None:
    class Full(CpuAccelerator):
        def available_memory(self, device_index: Any = None) -> int:
            return 10 * MIB

    result = run_check(BY_ID["memory-available_memory_shrinks_with_a_tensor"], Full())
    assert (result.outcome, result.detail.partition(",")[0]) == ("absent", f"only {10 * MIB} bytes are available")


def test_a_builder_of_older_code_needs_no_reason() -> None:
    class Older:
        NAME = "older"

        def is_compatible(self, verbose: bool = False) -> bool:
            return False

        def load(self, verbose: bool = False) -> Any:
            raise RuntimeError

    class Works(CpuAccelerator):
        spec = from_package(builders(Older=Older, Fine=Builder, Base=type("Base", (Builder,), {"NAME": ""})))

    result = run_check(BY_ID["op_builders-every_builder_loads_or_says_why_not"], Works())
    assert (result.outcome, result.detail) == ("pass", "1 of 2 load, the others say why not")


def test_a_collective_that_the_package_brings_is_imported_first() -> None:
    class Needs(CpuAccelerator):
        spec = dataclasses.replace(CPU.spec, collectives=(CollectiveBackend("gloo", "json"),), package="colorsys")

    assert run_check(BY_ID["processes-a_process_group_reduces_a_tensor"], Needs()).detail == "gloo"


def test_messages_say_what_was_expected_and_seen() -> None:
    with pytest.raises(ConformanceError, match=r"^expected bytes, got a{300}\.\.\.$"):
        expect(False, "bytes", "a" * 400)
    with pytest.raises(ConformanceError, match="expected f to raise ValueError, got KeyError: 'x'"):
        expect_error("f", lambda: {}["x"], ValueError)
    with pytest.raises(ConformanceError, match="expected f to raise ValueError, got 5 returned"):
        expect_error("f", lambda: 5, ValueError)
    with pytest.raises(ConformanceError, match=r"with \['six'\] in its message, got invalid literal"):
        expect_error("f", lambda: int("x"), ValueError, "six")


def test_run_and_pytest_see_the_same_checks() -> None:
    from anyaccel.accelerator.conformance import test_conformance

    (mark,) = test_conformance.test_conformance.pytestmark  # type: ignore[attr-defined]
    assert [param.id for param in mark.args[1]] == [check.id for check in run.select_checks()]
