# SPDX-License-Identifier: Apache-2.0
"""Every backend × every method of the interface, against the recorded signatures of the vendors' modules.

A pair is right when it gives what vendors.py says, or raises CapabilityError where the backend declares that it has
no such thing. An AttributeError or a TypeError of the module is a call that the vendor does not have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_vendor import PACKAGES, SPARE_TYPES, FakeVendor, installed, write_package
from vendors import BACKENDS, CASES, HERE, NAMES, Outcome, run_all

from anyaccel.accelerator import get_accelerator, select
from anyaccel.errors import AcceleratorUnavailableError
from anyaccel.inference.device.capture import Captured
from anyaccel.vendors import HOST, VENDORS
from generators import backends


def problem(outcome: Outcome, absent: bool, outdated: bool) -> str:
    """What is wrong with the outcome of one method; empty when nothing is."""
    if not absent:
        return "" if outcome.result == "right" else outcome.result
    if outcome.result != "absent":
        return f"must raise CapabilityError, but: {outcome.result}"
    return "" if outcome.declared or outdated else "it raises CapabilityError, but has() says it is there"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_method(name: str) -> None:
    outcomes, backend = run_all()[name], BACKENDS[name]
    assert list(outcomes) == list(NAMES)
    problems = {
        method: problem(outcome, method in backend.absent, method in backend.outdated)
        for method, outcome in outcomes.items()
    }
    assert {method: text for method, text in problems.items() if text} == {}


def test_every_method_and_every_backend_is_covered() -> None:
    assert set(CASES) == set(NAMES)
    assert {backend.entry or name for name, backend in BACKENDS.items()} == {
        entry.name for entry in select.REGISTRY if entry.origin == "anyaccel"
    }


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", ["cuda", "npu", "hpu", "mlu", "musa", "supa", "xpu.native", "mtia"])
def test_what_decoding_asks_of_graphs_is_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A step in pieces, with the memory of another step's graphs where the vendor's can share it; replays; its end."""

    class Ranks:
        capturable = False

        @contextmanager
        def in_pieces(self, between: Callable[[Callable[[], object]], None]) -> Iterator[None]:
            self.between = between
            yield

    ranks, called = Ranks(), []

    def work() -> torch.Tensor:
        assert vendor.state.capturing
        ranks.between(lambda: called.append(vendor.state.capturing))
        assert vendor.state.capturing
        return torch.zeros(1)

    monkeypatch.setenv("DS_ACCELERATOR", name)
    with installed(name) as vendor:
        assert get_accelerator().has("graphs")
        first = Captured(work, ranks)
        assert (not vendor.state.capturing, called) == (True, [])
        first.replay()
        first.replay()
        assert called == [False, False]
        second = Captured(work, ranks, first.pool)
        assert (second.pool == first.pool) and (first.pool is None) == (name == "hpu")
        for each in (first, second):
            each.reset()


# The fake itself -------------------------------------------------------------------------------------------


def test_the_fake_refuses_what_the_vendor_does_not_take() -> None:
    cuda, mps, npu = FakeVendor("cuda"), FakeVendor("mps"), FakeVendor("npu")
    with pytest.raises(TypeError):
        cuda.initial_seed(3)
    with pytest.raises(AttributeError):
        cuda.reset_max_memory_reserved()
    with pytest.raises(TypeError):
        cuda.graph(cuda.CUDAGraph(), polo=1)
    with pytest.raises(TypeError):
        cuda.cudart().cudaHostRegister(ptr=1, size=2, flags=0)  # compiled: by position only
    with pytest.raises(TypeError):
        mps.Event().record(None)
    with pytest.raises(TypeError):
        mps.synchronize(0)
    with pytest.raises(TypeError):
        npu.get_device_properties(device=0)
    npu.mstx.range_push("message", domain="mine")
    with pytest.raises(ValueError, match="Expected a npu device"):
        npu.memory_allocated("cuda:0")
    with pytest.raises(AttributeError):
        FakeVendor("hpu", lazy=False).HPUGraph  # noqa: B018
    assert not hasattr(FakeVendor("musa"), "default_generators")
    assert FakeVendor("xpu").default_generators == ()
    assert len(FakeVendor("hpu").random.default_generators) == 1


def test_the_recorded_surfaces_of_torch_are_those_of_this_torch() -> None:
    if not torch.__version__.startswith("2.13"):
        pytest.skip(f"recorded from torch 2.13, this is {torch.__version__}")
    for name in ("cuda", "xpu", "mps", "mtia"):
        recorded = FakeVendor(name).recorded
        module = getattr(torch, name)
        conditional = {"_exchange_device", "_maybe_exchange_device"}
        missing = {item for item in recorded["functions"] if not hasattr(module, item)} - conditional
        assert missing == set(), f"torch.{name}"


# DS_ACCELERATOR --------------------------------------------------------------------------------------------

# What is asked for, what is installed, and the class that must come.
FORCED = [
    ("cuda", "cuda.rocm", "CudaAccelerator"),
    ("xpu", "xpu.native", "XpuAccelerator"),
    ("xpu", "xpu.ipex", "IpexAccelerator"),
    ("xpu.external", "xpu.external.older", "ExternalXpuAccelerator"),
    ("hpu", "hpu.eager", "HpuAccelerator"),
    *(
        (name, name, target.partition(":")[2])
        for vendor in VENDORS.values()
        for name, (target, _) in vendor.backends.items()
        if name != HOST
    ),
]


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize(("asked", "software", "kind"), FORCED)
def test_forced(monkeypatch: pytest.MonkeyPatch, asked: str, software: str, kind: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    with installed(software):
        accelerator = get_accelerator()
        assert type(accelerator).__name__ == kind
        assert accelerator.device_count() == 2
        assert accelerator._name == asked.partition(".")[0]


_ABSENT = "which is not installed on this system"


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        *(
            (backend, f"{name.upper()}_Accelerator requires {package}, {_ABSENT}")
            for name, vendor in VENDORS.items()
            for backend, (_, package) in vendor.backends.items()
            if package
        ),
        ("xpu", f"XPU_Accelerator requires intel_extension_for_pytorch, {_ABSENT}"),
        ("xpu", "XPU_Accelerator requires a build of torch with XPU support"),
        ("xpu.native", "XPU_Accelerator requires a build of torch with XPU support"),
        ("mps", "MPS_Accelerator requires torch.mps"),
        ("mtia", "MTIA_Accelerator requires a build of torch with MTIA support"),
        ("cuda", "CUDA_Accelerator requires a CUDA or ROCm build of torch"),
    ],
)
def test_forced_without_the_software(monkeypatch: pytest.MonkeyPatch, asked: str, reason: str) -> None:
    for build in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, build, None)
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    with pytest.raises(AcceleratorUnavailableError) as caught:
        get_accelerator()
    assert f"DS_ACCELERATOR={asked}: " in str(caught.value)
    assert reason in str(caught.value)
    assert "install" in str(caught.value) or "use a Mac" in str(caught.value)


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("software", [*SPARE_TYPES, "mps", "hpu", "mtia", "xpu.ipex"])
def test_without_a_device_it_is_passed_over(monkeypatch: pytest.MonkeyPatch, software: str) -> None:
    with installed(software) as vendor:
        vendor.state.count = 0
        assert get_accelerator()._name != software
        (row,) = [row for row in select.detection_report().candidates if row.name == software]
        assert row.available is False
        assert row.installed
        assert "sees no device" in row.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [("npu", "libascendcl.so: cannot open shared object file"), ("xpu.external", "No module named 'deepspeed'")],
)
@pytest.mark.usefixtures("undecided")
def test_a_package_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, reason: str
) -> None:
    (file,) = PACKAGES[name]
    broken = {"npu": f"raise ImportError({reason!r})", "xpu.external": "import deepspeed.accelerator"}[name]
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(AcceleratorUnavailableError, match=r"whose import raised"):
        get_accelerator()


def test_in_a_new_process(tmp_path: Path) -> None:
    """As a user has it: the package is on the path, one variable is set."""
    write_package(tmp_path, "npu")
    script = (
        "import torch; torch.utils.rename_privateuse1_backend('npu')\n"
        "from anyaccel.accelerator import describe_choice, get_accelerator\n"
        "a = get_accelerator()\n"
        "print(a._name, a.device(1), a.current_device_name(), a.total_memory() >> 30, describe_choice())\n"
    )
    path = os.pathsep.join([str(tmp_path), str(HERE), *sys.path[1:]])
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "npu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=100)
    assert done.stdout.split() == ["npu", "npu:1", "npu:1", "80", "npu,", "DS_ACCELERATOR=npu", "is", "set"], (
        done.stderr
    )


# docs/backends.md says what the backends do; here, since it takes seconds to find that out -------------------


def test_the_page_is_up_to_date() -> None:
    assert backends.page(run_all()) == backends.PAGE.read_text(), "run python tools/pages.py backends"


def test_each_method_has_one_row_and_each_backend_its_place() -> None:
    rows = [method for methods in backends.GROUPS.values() for method in methods.split()]
    assert sorted(rows) == sorted(NAMES)
    other = {"xpu.external", "xpu.external.older", "xpu.ipex.older"}  # told in words, or gone
    assert {*backends.COLUMNS.values(), *backends.VARIANTS} == set(BACKENDS) - other
