# SPDX-License-Identifier: Apache-2.0
"""What the kernel shows of accelerators: how many, which, at which NUMA node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from anyaccel.errors import UsageError
from anyaccel.launch.plan.devices import count_devices, device_nodes, find_devices, narrow_devices
from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.launch.plan.plan import HostPlace
from anyaccel.launch.plan.planning import make_plan
from anyaccel.topology import Machine, read_machine
from sysfs_trees import MACHINES, Spec, build

pytestmark = pytest.mark.many_files


def test_variants_of_an_accelerator_have_its_devices(tmp_path: Path) -> None:
    found = machine(tmp_path)
    devices = find_devices(found, {"DS_ACCELERATOR": "xpu.ipex", "ZE_AFFINITY_MASK": "0,1"}, str(tmp_path))
    assert (devices.accelerator, devices.count, devices.variable) == ("xpu", 2, "ZE_AFFINITY_MASK")


def write(root: Path, path: str, text: object = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, spec: Spec = MACHINES["two sockets"]) -> Machine:
    build(spec, root)
    return read_machine(root)


def pci(root: Path, address: str, vendor: str, code: str, node: int) -> None:
    for name, value in {"vendor": vendor, "class": code, "numa_node": node}.items():
        write(root, f"sys/bus/pci/devices/{address}/{name}", value)


def nvidia(root: Path, nodes: Iterable[int], *, minors: Iterable[int] | None = None, driver: bool = True) -> None:
    """GPUs at these nodes by PCI address; `minors` are their device files, where the driver counts otherwise."""
    nodes = list(nodes)
    for index, (node, minor) in enumerate(zip(nodes, minors or range(len(nodes)), strict=True)):
        address = f"0000:{16 * (index + 1):02x}:00.0"
        pci(root, address, "0x10de", "0x030200", node)
        write(root, f"dev/nvidia{minor}")
        if driver:
            facts = f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{index}abc\nDevice Minor: \t {minor}"
            write(root, f"proc/driver/nvidia/gpus/{address}/information", facts)
    write(root, "dev/nvidiactl")


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, (0, 0, 1, 1)),
        ("2,3", (1, 1)),
        ("3, 0", (1, 0)),
        ("1,-1,2", (0,)),
        ("7", (None,)),
        ("", (0, 0, 1, 1)),  # counts as no GPU, and then it is the CPU that has none
    ],
)
def test_nvidia(visible: str | None, nodes: tuple[int | None, ...], driver: bool, tmp_path: Path) -> None:
    found = machine(tmp_path)
    nvidia(tmp_path, (0, 0, 1, 1), driver=driver)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if visible == "":
        assert find_devices(found, environ, str(tmp_path)).accelerator == "cpu"
        assert device_nodes(found, environ, str(tmp_path)) == ()
        return
    assert device_nodes(found, environ, str(tmp_path)) == nodes


def test_nvidia_by_name_and_in_a_container(tmp_path: Path) -> None:
    found = machine(tmp_path)
    nvidia(tmp_path, (0, 0, 1, 1), minors=(3, 2, 1, 0))
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-2abc,GPU-0"}
    assert device_nodes(found, environ, str(tmp_path)) == (1, 0)
    (tmp_path / "dev/nvidia3").unlink()  # the first one by address is kept from us
    assert count_devices(found, {}, str(tmp_path)) == 3
    assert device_nodes(found, {}, str(tmp_path)) == (0, 1, 1)
    assert device_nodes(found, {}, str(tmp_path), device_ids=(2, 0)) == (1, 0)


def test_nodes_that_the_firmware_does_not_tell(tmp_path: Path) -> None:
    found = machine(tmp_path)
    nvidia(tmp_path, (-1, 1))
    assert device_nodes(found, {}, str(tmp_path)) == (None, 1)
    # Without the driver's word, more devices on PCI than files: which is which?
    pci(tmp_path, "0000:f0:00.0", "0x10de", "0x030000", 1)
    (tmp_path / "proc/driver/nvidia/gpus/0000:10:00.0/information").unlink()
    assert device_nodes(found, {}, str(tmp_path)) == (None, None)


def test_amd(tmp_path: Path) -> None:
    found = machine(tmp_path)
    write(tmp_path, "dev/kfd")
    nodes = "sys/class/kfd/kfd/topology/nodes"
    for node, (gpu_id, place) in enumerate([(0, 0), (0, 0), (51110, 0xC100), (2842, 0x4301)]):
        write(tmp_path, f"{nodes}/{node}/gpu_id", gpu_id)
        write(tmp_path, f"{nodes}/{node}/properties", f"simd_count 1\nlocation_id {place}\ndomain 0")
    pci(tmp_path, "0000:c1:00.0", "0x1002", "0x038000", 1)
    pci(tmp_path, "0000:43:00.1", "0x1002", "0x038000", 0)
    assert find_devices(found, {}, str(tmp_path)).variable == "HIP_VISIBLE_DEVICES"
    assert device_nodes(found, {}, str(tmp_path)) == (1, 0)
    assert device_nodes(found, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, str(tmp_path)) == (0,)


def test_gaudi_by_module(tmp_path: Path) -> None:
    found = machine(tmp_path)
    for index, (vendor, module, node) in enumerate([("0x8086", 0, 0), ("0x1da3", 1, 1), ("0x1da3", 0, 0)]):
        address = f"0000:{index + 1:02x}:00.0"
        pci(tmp_path, address, vendor, "0x120000", node)
        write(tmp_path, f"dev/accel/accel{index}")
        for name, value in {"vendor": vendor, "module_id": module, "pci_addr": address}.items():
            write(tmp_path, f"sys/class/accel/accel{index}/device/{name}", value)
    assert find_devices(found, {}, str(tmp_path)).accelerator == "hpu"
    assert device_nodes(found, {}, str(tmp_path)) == (0, 1)
    assert device_nodes(found, {"HABANA_VISIBLE_MODULES": "1"}, str(tmp_path)) == (1,)


@pytest.mark.parametrize(
    ("name", "file", "vendor", "variable"),
    [
        ("npu", "dev/davinci{}", "0x19e5", "ASCEND_RT_VISIBLE_DEVICES"),
        ("mlu", "dev/cambricon_dev{}", "0xcabc", "MLU_VISIBLE_DEVICES"),
        ("musa", "dev/mtgpu.{}", "0x1ed5", "MUSA_VISIBLE_DEVICES"),
        ("supa", "dev/biren/card_{}", "0x1ee0", "SUPA_VISIBLE_DEVICES"),
        ("klxpu", "dev/xpu{}", "0x1d22", "CUDA_VISIBLE_DEVICES"),
        ("tpu", "dev/accel{}", "0x1ae0", "TPU_VISIBLE_DEVICES"),
    ],
)
def test_devices_by_file_and_maker(name: str, file: str, vendor: str, variable: str, tmp_path: Path) -> None:
    found = machine(tmp_path)
    write(tmp_path, "dev/davinci_manager")
    write(tmp_path, "dev/xpuctrl")
    for index in range(2):
        write(tmp_path, file.format(index))
        pci(tmp_path, f"0000:{index + 1:02x}:00.0", vendor, "0x120000", 1 - index)
    devices = find_devices(found, {}, str(tmp_path))
    assert (devices.accelerator, devices.count, devices.variable) == (name, 2, variable)
    assert device_nodes(found, {}, str(tmp_path)) == (1, 0)
    assert device_nodes(found, {variable: "1"}, str(tmp_path)) == (0,)
    assert count_devices(found, {variable: "1"}, str(tmp_path)) == 1


def test_sdaa_is_counted_and_its_place_is_not_known(tmp_path: Path) -> None:
    found = machine(tmp_path)
    write(tmp_path, "dev/tcaicard0")
    write(tmp_path, "dev/tcaicard1")
    assert count_devices(found, {}, str(tmp_path)) == 2
    assert device_nodes(found, {}, str(tmp_path)) == (None, None)


def test_intel_gpus(tmp_path: Path) -> None:
    found = machine(tmp_path)
    for index, (vendor, node) in enumerate([("0x8086", 1), ("0x1a03", 0), ("0x8086", 0)]):
        address = f"0000:{9 - index:02x}:00.0"
        pci(tmp_path, address, vendor, "0x038000", node)
        write(tmp_path, f"dev/dri/renderD{128 + index}")
        link = tmp_path / f"sys/class/drm/renderD{128 + index}/device"
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / f"sys/bus/pci/devices/{address}")
    assert find_devices(found, {}, str(tmp_path)).accelerator == "xpu"
    assert device_nodes(found, {}, str(tmp_path)) == (0, 1)  # by address
    assert device_nodes(found, {"ZE_AFFINITY_MASK": "1.0"}, str(tmp_path)) == (1,)


def test_the_cpu_has_no_devices_on_pci(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert device_nodes(found, {}, str(tmp_path)) == ()
    nvidia(tmp_path, (0, 1))
    assert device_nodes(found, {"DS_ACCELERATOR": "cpu"}, str(tmp_path)) == ()
    assert device_nodes(found, {"DS_ACCELERATOR": "mtia"}, str(tmp_path)) == ()


def test_narrowing_what_is_visible() -> None:
    assert narrow_devices("CUDA_VISIBLE_DEVICES", {}, (0, 2)) == "0,2"
    assert narrow_devices("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "4,5,GPU-7"}, (0, 2)) == "4,GPU-7"
    with pytest.raises(UsageError, match=r"slot 3 was asked for, but CUDA_VISIBLE_DEVICES='4,5' leaves only 2"):
        narrow_devices("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "4,5"}, (1, 3))


# the whole way


def test_a_plan_on_eight_gpus(tmp_path: Path) -> None:
    found = machine(tmp_path, MACHINES["eight gpus"])
    for index in range(8):
        write(tmp_path, f"dev/nvidia{index}")
    options = LaunchOptions("x.py", bind_cores=True)
    plan = make_plan(options, found, environ={}, place=HostPlace(), root=str(tmp_path))
    assert [binding.memory_nodes for binding in plan.ranks] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert [len(binding.cores) for binding in plan.ranks] == [4] * 8
    assert plan.warnings == ()
    some = make_plan(options, found, environ={}, place=HostPlace(devices=(6, 0)), root=str(tmp_path))
    assert [binding.memory_nodes for binding in some.ranks] == [(3,), (0,)]
    assert [binding.env["CUDA_VISIBLE_DEVICES"] for binding in some.ranks] == ["6,0"] * 2
    assert "CUDA_VISIBLE_DEVICES" not in plan.ranks[0].env


def test_a_plan_for_slots_of_the_cpu(tmp_path: Path) -> None:
    found = machine(tmp_path)
    plan = make_plan(LaunchOptions("x.py"), found, environ={}, place=HostPlace(devices=(0, 3)), root=str(tmp_path))
    assert len(plan.ranks) == 2
    assert not any(name.endswith("_DEVICES") for name in plan.ranks[0].env)


def test_strict_plans_want_to_know_the_node(tmp_path: Path) -> None:
    found = machine(tmp_path)
    nvidia(tmp_path, (-1, -1))
    options = LaunchOptions("x.py", bind_cores=True, strict=True)
    with pytest.raises(UsageError, match=r"does not say at which NUMA node .* because of --strict"):
        make_plan(options, found, environ={}, place=HostPlace(), root=str(tmp_path))
