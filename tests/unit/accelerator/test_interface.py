# SPDX-License-Identifier: Apache-2.0
"""The interface is complete, its signatures are those of existing code, and an extension needs little."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from interface import METHODS, PROPERTIES

from anyaccel.accelerator import (
    Accelerator,
    BackendSpec,
    Capabilities,
    Capability,
    TorchDeviceAccelerator,
    get_accelerator,
    synchronous,
)
from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.accelerator.backends.cuda import CudaAccelerator
from anyaccel.errors import CapabilityError

REQUIRED = {"device_count", "current_device", "set_device", "synchronize"}


@pytest.mark.parametrize("kind", [Accelerator, CpuAccelerator, CudaAccelerator])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_signature(kind: type[Accelerator], name: str) -> None:
    expected = [p.strip().partition("=") for p in METHODS[name].split(",") if p.strip()]
    parameters = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
    assert [str(p).split(":")[0].split("=")[0].strip() for p in parameters][: len(expected)] == [
        parameter for parameter, _, _ in expected
    ]
    for parameter, (_, _, default) in zip(parameters, expected, strict=False):
        if default:
            assert repr(parameter.default) == default
    for further in parameters[len(expected) :]:
        assert further.default is not inspect.Parameter.empty, f"{further} would break existing calls"


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_property(name: str) -> None:
    assert isinstance(getattr(Accelerator, name), property)


def test_every_public_method_is_part_of_the_interface() -> None:
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    beyond = {"probe", "has", "runtime_versions", "supports_nvtx_domain"}  # not methods, or not DeepSpeed's
    assert public - set(METHODS) - PROPERTIES <= beyond, "add it to interface.py and to the docs"


def test_few_methods_are_required() -> None:
    assert Accelerator.__abstractmethods__ == REQUIRED


class Minimal(Accelerator):
    """The least that an extension can bring: no streams, no memory figures, nothing."""

    spec = BackendSpec(name="minimal", device_type="meta", torch_module="torch.minimal")

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def set_device(self, device_index: object) -> None:
        return

    def synchronize(self, device_index: object = None) -> None:
        return


def test_a_minimal_extension_works() -> None:
    minimal = Minimal()
    assert minimal.is_available()
    assert minimal._name == "minimal"
    assert minimal.current_device_name() == "meta:1"
    assert minimal.device(0) == torch.device("meta", 0)
    assert minimal.FloatTensor(2, 3).shape == (2, 3)
    assert minimal.on_accelerator(torch.empty(1, device="meta"))
    assert not minimal.is_synchronized_device()
    assert Minimal.probe() is None


def test_a_minimal_extension_has_only_what_needs_no_method() -> None:
    minimal = Minimal()
    assert {capability for capability in Capability if minimal.has(capability)} == {"pinned_memory", "fp64"}


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        ("streams", ["Stream", "stream", "current_stream"]),
        ("events", ["Event"]),
        ("graphs", ["create_graph", "capture_to_graph"]),
        ("rng", ["default_generator"]),
        ("memory_stats", ["memory_allocated", "memory_stats"]),
        ("peak_memory", ["max_memory_allocated", "reset_peak_memory_stats"]),
        ("reserved_memory", ["memory_allocated", "memory_stats"]),
        ("reserved_memory", ["memory_reserved"]),
        ("memory_size", ["total_memory", "available_memory"]),
        ("register_host_memory", ["register_host_memory", "unregister_host_memory"]),
    ],
)
def test_what_an_extension_implements_it_has(capability: str, names: list[str]) -> None:
    methods = dict.fromkeys(names, lambda self, *_args: None)
    assert type("Complete", (Minimal,), methods)().has(capability)
    del methods[names[-1]]
    assert not type("Incomplete", (Minimal,), methods)().has(capability)
    reason = Capabilities(absent={Capability(capability): "the driver is too old"})
    methods["spec"] = BackendSpec(name="x", device_type="meta", torch_module="", capabilities=reason)
    assert not type("Declared", (Minimal,), methods)().has(capability)


def test_a_torch_device_without_a_graph_class_has_no_graphs() -> None:
    class Graphless(TorchDeviceAccelerator):
        spec = BackendSpec(name="graphless", device_type="meta", torch_module="torch.cuda")

    device = Graphless()
    assert device.has("streams")
    assert not device.has("graphs")
    with pytest.raises(CapabilityError, match="'graphs'"):
        device.create_graph()


def test_copies_and_pickles_are_the_accelerator_of_the_process() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.accelerator = get_accelerator()

    layer = Layer()
    assert copy.deepcopy(layer).accelerator is layer.accelerator is copy.copy(layer.accelerator)
    assert pickle.loads(pickle.dumps(layer.accelerator)) is layer.accelerator


@pytest.mark.parametrize(
    ("capability", "call"),
    [
        ("streams", lambda a: a.Stream),
        ("events", lambda a: a.Event),
        ("streams", lambda a: a.current_stream()),
        ("graphs", lambda a: a.create_graph()),
        ("rng", lambda a: a.default_generator(0)),
        ("rng", lambda a: a.manual_seed(1)),
        ("memory_stats", lambda a: a.memory_allocated()),
        ("memory_stats", lambda a: a.memory_cached()),
        ("peak_memory", lambda a: a.reset_max_memory_cached()),
        ("peak_memory", lambda a: a.max_memory_reserved()),
        ("collectives", lambda a: a.communication_backend_name()),
        ("memory_size", lambda a: a.total_memory()),
        ("op_builders", lambda a: a.op_builder_dir()),
        ("CPUAdamBuilder", lambda a: a.create_op_builder("CPUAdamBuilder")),
    ],
)
def test_what_is_missing_is_one_error_that_names_it(capability: str, call: object) -> None:
    with pytest.raises(CapabilityError, match=f"'minimal' does not have '{capability}'") as caught:
        call(Minimal())
    assert caught.value.capability == capability


def test_a_synchronous_device_gets_streams_that_do_nothing_and_graphs() -> None:
    class Synchronous(Minimal):
        spec = BackendSpec(
            name="sync", device_type="meta", torch_module="", capabilities=Capabilities(synchronous=True)
        )

    device = Synchronous()
    assert device.Stream is synchronous.Stream
    assert isinstance(device.create_graph(), synchronous.Graph)
    assert device.use_host_timers()
    assert device.resolves_data_dependency()
    assert device.handles_memory_backpressure()


def test_the_declared_reason_is_in_the_error() -> None:
    class Declared(Minimal):
        spec = BackendSpec(
            name="declared",
            device_type="meta",
            torch_module="",
            capabilities=Capabilities(absent={Capability.GRAPHS: "the runtime records nothing"}),
        )

    assert not Declared().has("graphs")
    with pytest.raises(CapabilityError, match="the runtime records nothing"):
        Declared().create_graph()


def test_a_single_method_can_be_absent() -> None:
    class Declared(Minimal):
        spec = BackendSpec(
            name="declared",
            device_type="meta",
            torch_module="torch.cuda",
            capabilities=Capabilities(absent={"available_memory": "the driver does not tell"}),
        )
        _module = torch.cuda
        _vendor = TorchDeviceAccelerator._vendor

    with pytest.raises(CapabilityError, match="does not have 'available_memory': the driver does not tell"):
        Declared()._vendor("mem_get_info", "available_memory")


def test_an_absent_capability_needs_a_reason_and_a_known_name() -> None:
    with pytest.raises(ValueError, match="without a reason"):
        Capabilities(absent={Capability.GRAPHS: ""})
    with pytest.raises(ValueError, match="gravity"):
        Capabilities(absent={"gravity": "it floats"})
    with pytest.raises(ValueError, match="gravity"):
        Minimal().has("gravity")


def test_op_builders_of_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "minimal_ops.py").write_text("class FusedAdamBuilder:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)

    class WithOps(Minimal):
        spec = BackendSpec(name="ops", device_type="meta", torch_module="", op_builders="minimal_ops")

    device = WithOps()
    assert device.has("op_builders")
    assert device.op_builder_dir() == "minimal_ops"
    assert device.get_op_builder("FusedAdamBuilder").__name__ == "FusedAdamBuilder"
    assert type(device.create_op_builder("FusedAdamBuilder")).__name__ == "FusedAdamBuilder"
    assert device.get_op_builder("LionBuilder") is None
    with pytest.raises(CapabilityError, match="minimal_ops does not define it"):
        device.create_op_builder("LionBuilder")


def test_a_missing_package_and_a_missing_device_are_reasons() -> None:
    class NoPackage(Minimal):
        spec = BackendSpec(name="npu", device_type="meta", torch_module="", package="torch_npu_missing")

    missing = NoPackage.probe()
    assert missing is not None
    assert missing.reason == ("NPU_Accelerator requires torch_npu_missing, which is not installed on this system")
    assert not missing.installed

    class NoDevice(Minimal):
        def device_count(self) -> int:
            return 0

    missing = NoDevice.probe()
    assert missing is not None
    assert "sees no device" in missing.reason
    assert missing.installed
    assert not NoDevice().is_available()


def test_the_guide_names_every_method() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "accelerator.md").read_text()
    implied = {"max_memory_allocated", "max_memory_reserved", "max_memory_cached"}
    assert [name for name in sorted({*METHODS, *PROPERTIES} - implied) if f"`{name}" not in guide] == []
