# SPDX-License-Identifier: Apache-2.0
"""Caches, devices and off-line CPUs: what is read apart from a launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel.errors import UsageError
from anyaccel.topology import read_machine
from anyaccel.topology.details import Details, parse_size, read_caches, read_details, read_devices
from anyaccel.topology.sysfs import check_recording
from sysfs_trees import MACHINES, build

pytestmark = pytest.mark.many_files


def details(name: str, root: Path) -> Details:
    build(MACHINES[name], root)
    return read_details(read_machine(root), root)


def test_each_cache_is_there_once(tmp_path: Path) -> None:
    caches = details("nps4", tmp_path).caches
    count = {name: sum(cache.name == name for cache in caches) for name in ("L1d", "L1i", "L2", "L3")}
    assert count == {"L1d": 64, "L1i": 64, "L2": 64, "L3": 8}
    l3 = next(cache for cache in caches if cache.name == "L3")
    assert (l3.size_bytes, l3.cpus) == (32 << 20, (*range(8), *range(64, 72)))
    assert [cache.level for cache in caches] == sorted(cache.level for cache in caches)


def test_clusters_of_efficiency_cores_share_a_cache(tmp_path: Path) -> None:
    caches = details("hybrid", tmp_path).caches
    assert [cache.cpus for cache in caches if cache.size_bytes == 4 << 20] == [(16, 17, 18, 19), (20, 21, 22, 23)]
    assert sum(cache.name == "L2" for cache in caches) == 10


def test_off_line_cpus_have_no_part_in_caches(tmp_path: Path) -> None:
    found = details("off-line cores", tmp_path)
    assert found.offline_cpus == (1, 5, 9, 10, 15)
    assert not {cpu for cache in found.caches for cpu in cache.cpus} & set(found.offline_cpus)


def test_caches_that_the_kernel_does_not_show(tmp_path: Path) -> None:
    build(MACHINES["one socket"], tmp_path)
    cache = tmp_path / "sys/devices/system/cpu/cpu0/cache"
    (cache / "index3/level").write_text("")
    (cache / "index2/size").unlink()
    (cache / "index0/shared_cpu_list").unlink()
    found = [cache for cache in read_caches(read_machine(tmp_path), tmp_path) if 0 in cache.cpus]
    assert [(cache.name, cache.size_bytes) for cache in found] == [
        ("L1d", 48 << 10),
        ("L1i", 32 << 10),
        ("L2", 0),
        ("L3", 105 << 20),  # other CPUs still tell of it
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [("32K", 32768), ("2M", 2 << 20), ("1g", 1 << 30), ("64 KB", 65536), ("512", 512), ("", 0), (None, 0), ("K", 0)],
)
def test_sizes(text: str | None, size: int) -> None:
    assert parse_size(text) == size


def test_memory_side_cache(tmp_path: Path) -> None:
    assert details("xeon max, cache", tmp_path).memory_caches == {0: 64 << 30, 1: 64 << 30}


def test_devices_and_their_nodes(tmp_path: Path) -> None:
    devices = details("eight gpus", tmp_path).devices
    gpus = [device for device in devices if not device.is_console]
    assert [(gpu.address, gpu.node) for gpu in gpus] == [
        (f"0000:{17 + 16 * number:02x}:00.0", number // 2) for number in range(8)
    ]
    assert (gpus[0].kind, gpus[0].label, gpus[0].driver) == ("display", "NVIDIA 2330", "")
    console = next(device for device in devices if device.is_console)
    assert (console.label, console.node) == ("ASPEED 2000", None)


def test_other_accelerators(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices"
    rows = {
        "10000:01:00.0": ("0x120000", "0x1da3", "0x1060"),
        "0000:a1:00.0": ("0x0b4000", "0x8086", "0x0b25"),
        "0000:01:00.0": ("0x020000", "0x15b3", "0x101d"),
        "0000:02:00.0": ("0x030000", "0x4242", "0x0001"),
    }
    for address, values in rows.items():
        (folder / address).mkdir(parents=True)
        for name, value in zip(("class", "vendor", "device"), values, strict=True):
            (folder / address / name).write_text(value)
    driver = tmp_path / "sys/bus/pci/drivers/habanalabs"
    driver.mkdir(parents=True)
    (folder / "10000:01:00.0" / "driver").symlink_to("../../drivers/habanalabs")
    found = read_devices(tmp_path)
    # By number: the long domain comes last.
    assert [(device.kind, device.label, device.driver) for device in found] == [
        ("display", "0x4242 0001", ""),
        ("accelerator", "Intel 0b25", ""),
        ("accelerator", "Habana 1060", "habanalabs"),
    ]


def test_the_driver_of_a_device_whose_driver_was_not_recorded(tmp_path: Path) -> None:
    build(MACHINES["eight gpus"], tmp_path)
    link = tmp_path / "sys/bus/pci/devices/0000:11:00.0/driver"
    link.symlink_to("../../../../bus/pci/drivers/nvidia")
    assert [device.driver for device in read_devices(tmp_path)][1] == "nvidia"


def test_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    found = read_details(read_machine(tmp_path), tmp_path)
    assert found == Details()


def test_this_machine() -> None:
    machine = read_machine()
    found = read_details(machine)
    online = {cpu.id for cpu in machine.cpus}
    assert all(online.issuperset(cache.cpus) for cache in found.caches)
    assert not online.intersection(found.offline_cpus)


def test_a_launch_does_not_pay_for_details() -> None:
    code = "import sys, anyaccel.launch as l; from anyaccel.topology import read_machine; read_machine(); "
    code += "print('anyaccel.topology.details' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_a_folder_that_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a folder"):
        check_recording(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no CPUs in .*/sys/devices/system/cpu; give the folder that has sys/"):
        check_recording(tmp_path)
    build(MACHINES["one socket"], tmp_path / "inside")
    with pytest.raises(UsageError, match=r"did you mean .*/inside\?"):
        check_recording(tmp_path)
    check_recording(tmp_path / "inside")
