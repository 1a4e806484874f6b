# SPDX-License-Identifier: Apache-2.0
"""Finds the devices of this machine and their NUMA nodes from /dev, /sys and /proc, without torch or vendor libraries.

The launcher cannot know which accelerator torch was built for; DS_ACCELERATOR tells it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.topology import Machine
from anyaccel.topology.files import names, number, numbered, numbers, read_text
from anyaccel.vendors import HOST, VENDORS

# PCI classes that compute: display (VGA, 3D), processing accelerator, co-processor.
_PCI_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200", "0x0b40")


class _Device:
    """One device as the kernel shows it.

    Attributes:
        address: its PCI address, as in `lspci -D`; "" if unknown.
        name: a name by which a visible-devices variable may list it instead of its number.
    """

    __slots__ = ("address", "name")

    def __init__(self, address: str = "", name: str = "") -> None:
        self.address, self.name = address, name


class AcceleratorDevices:
    """How devices of one accelerator are found.

    Attributes:
        visible: its visible-devices variables, the one with the highest priority first.
        find: returns the devices below a root folder, in the order of the vendor's runtime; None if there is no known
            way.
        also_visible: returns variables with priority over `visible` on the machine below a root folder.
        is_host: whether its devices are the NUMA nodes with allowed cores.
    """

    __slots__ = ("also_visible", "find", "is_host", "visible")

    def __init__(
        self,
        visible: tuple[str, ...] = (),
        find: Callable[[str], list[_Device]] | None = None,
        also_visible: Callable[[str], tuple[str, ...]] | None = None,
        is_host: bool = False,
    ) -> None:
        self.visible, self.find, self.also_visible, self.is_host = visible, find, also_visible, is_host


class Devices:
    """The devices that workers of this machine use.

    Attributes:
        accelerator: name of the accelerator, "cpu" where there is no other.
        count: the number of devices; 0 if it cannot be known.
        variable: the visible-devices variable; "" for none.
    """

    __slots__ = ("accelerator", "count", "variable")

    def __init__(self, accelerator: str, count: int, variable: str = "") -> None:
        self.accelerator, self.count, self.variable = accelerator, count, variable


def find_devices(machine: Machine, environ: Mapping[str, str], root: str = "") -> Devices:
    """The accelerator of this machine, and how many devices it has for workers.

    DS_ACCELERATOR names the accelerator; without it, one that has devices here is taken, else the CPU. Devices
    are those that the kernel shows, at most as many as the visible-devices variable lists; for an accelerator
    that was asked for by name that list alone counts. The CPU has one device per NUMA node with allowed cores.

    Args:
        root: where `dev/`, `sys/` and `proc/` are; tests give a tree of their own.
    """
    # Not through anyaccel.env, whose import takes 15 ms of each launch.
    asked = environ.get("DS_ACCELERATOR", "")
    if asked not in ACCELERATORS:
        asked = asked.partition(".")[0]  # xpu.ipex is another way to an xpu
    for name in (asked,) if asked else ACCELERATORS:
        kind = ACCELERATORS.get(name, AcceleratorDevices())
        if kind.is_host:
            break
        found = kind.find(root) if kind.find else []
        variables = _variables(name, root)
        listed = _listed(environ, variables)
        # Without DS_ACCELERATOR, the variable may be a stray one, from a login script that is used on many nodes.
        count = len(found) if listed is None else len(listed) if asked else min(len(listed), len(found))
        if count or asked:
            return Devices(name, count, variables[0] if variables else "")
    return Devices(HOST, max(1, len(machine.nodes_with_cores())))


def count_devices(machine: Machine, environ: Mapping[str, str], root: str = "") -> int:
    """The number of devices that `find_devices` finds.

    Raises:
        UsageError: DS_ACCELERATOR names one whose devices cannot be counted like this, or that has none.
    """
    found = find_devices(machine, environ, root)
    if found.count:
        return found.count
    kind = ACCELERATORS.get(found.accelerator)
    if kind is None or kind.find is None:
        raise UsageError(
            f"DS_ACCELERATOR={environ['DS_ACCELERATOR']!r}: cannot count its devices; give --num_accelerators"
        )
    check = " and ".join(sorted({*kind.visible, *_variables(found.accelerator, root)}))
    raise UsageError(
        f"DS_ACCELERATOR={found.accelerator!r}: no device visible; check {check}, or give --num_accelerators"
    )


def device_nodes(
    machine: Machine, environ: Mapping[str, str], root: str = "", device_ids: Sequence[int] | None = None
) -> tuple[int | None, ...]:
    """NUMA node of each device that workers see, in the order of local ranks; () where the CPU is the device.

    Args:
        device_ids: the numbers among the visible devices that take part; all when left out.

    A node is None where the firmware does not tell it, or where it is not known which device that is.
    """
    accelerator = find_devices(machine, environ, root).accelerator
    kind = ACCELERATORS.get(accelerator)
    if kind is None or kind.find is None:
        return ()
    found = kind.find(root)
    entries = _listed(environ, _variables(accelerator, root))
    chosen = found if entries is None else [_pick(found, entry) for entry in entries]
    if device_ids is not None:
        chosen = [chosen[index] if index < len(chosen) else _Device() for index in device_ids]
    nodes = {device.address: _node(root, device.address) for device in chosen}
    return tuple(nodes[device.address] for device in chosen)


def narrow_devices(variable: str, environ: Mapping[str, str], device_ids: Sequence[int]) -> str:
    """Value of a visible-devices variable that leaves only these of the visible devices.

    Raises:
        UsageError: the variable lists fewer devices than a number asks for.
    """
    entries = _listed(environ, (variable,))
    if entries is None:
        return ",".join(map(str, device_ids))
    missing = [index for index in device_ids if index >= len(entries)]
    if missing:
        raise UsageError(
            f"slot {missing[0]} was asked for, but {variable}={environ[variable]!r} leaves only {len(entries)} "
            "devices; choose among those, counted from 0, or unset the variable"
        )
    return ",".join(entries[index] for index in device_ids)


def _listed(environ: Mapping[str, str], variables: Sequence[str]) -> list[str] | None:
    """Entries of the first variable that is set; as in CUDA, those after a negative or empty entry do not count."""
    text = next((environ[name] for name in variables if name in environ), None)
    if text is None:
        return None
    entries: list[str] = []
    for entry in text.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        entries.append(entry.strip())
    return entries


def _pick(devices: Sequence[_Device], entry: str) -> _Device:
    """The device that an entry names: "2", "2.1" (a part of it, Intel), "GPU-5f3c" (the start of a name)."""
    index = entry.partition(".")[0]
    if index.isascii() and index.isdigit():
        return devices[int(index)] if len(index) < 10 and int(index) < len(devices) else _Device()
    named = [device for device in devices if device.name and device.name.startswith(entry)]
    return named[0] if len(named) == 1 else _Device()


def _node(root: str, address: str) -> int | None:
    """NUMA node of a PCI device; -1 in the file means that the firmware does not say."""
    found = numbers(read_text(f"{root}/sys/bus/pci/devices/{address}/numa_node")) if address else None
    return found[0] if found else None


def _variables(accelerator: str, root: str) -> tuple[str, ...]:
    kind = ACCELERATORS.get(accelerator, AcceleratorDevices())
    return (*(kind.also_visible(root) if kind.also_visible else ()), *kind.visible)


def _rocm_variables(root: str) -> tuple[str, ...]:
    """ROCm's own variable, which has priority over CUDA's, on a machine without NVIDIA's GPUs."""
    return () if _nvidia(root) else ("HIP_VISIBLE_DEVICES",)


def _pci(root: str, vendor: str) -> list[str]:
    """PCI addresses of the vendor's compute devices, ascending."""
    folder = f"{root}/sys/bus/pci/devices"
    return sorted(
        address
        for address in names(folder)
        if read_text(f"{folder}/{address}/vendor") == vendor
        and (read_text(f"{folder}/{address}/class") or "").startswith(_PCI_CLASSES)
    )


def _numbered_files(folder: str, prefix: str, vendor: str = "") -> Callable[[str], list[_Device]]:
    """A finder for devices that have a numbered file each, and PCI addresses if the vendor has as many PCI devices."""

    def find(root: str) -> list[_Device]:
        files = numbered(f"{root}{folder}", prefix)
        addresses = _pci(root, vendor) if vendor and files else []
        # If the numbers differ (a container sees all PCI devices), it is unknown which address belongs to which file.
        return [_Device(address) for address in addresses] if len(addresses) == len(files) else [_Device()] * len(files)

    return find


def _cuda(root: str) -> list[_Device]:
    """NVIDIA's GPUs, else AMD's, which torch calls cuda too."""
    return _nvidia(root) or _amd(root)


def _nvidia(root: str) -> list[_Device]:
    """The GPUs of /dev/nvidia0 and so on, by PCI address, in which order CUDA counts equal ones."""
    minors = numbered(f"{root}/dev", "nvidia")
    folder = f"{root}/proc/driver/nvidia/gpus"
    found = []
    for address in names(folder) if minors else ():
        lines = (read_text(f"{folder}/{address}/information") or "").splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if facts.get("Device Minor", "").isdigit() and int(facts["Device Minor"]) in minors:
            found.append(_Device(address, facts.get("GPU UUID", "")))
    if len(found) == len(minors):
        return found
    addresses = _pci(root, "0x10de")
    return [_Device(address) for address in addresses] if len(addresses) == len(minors) else [_Device()] * len(minors)


def _amd(root: str) -> list[_Device]:
    """The GPUs of AMD's compute driver: a CPU has gpu_id 0, and a GPU that a container may not use is unreadable."""
    if not os.path.exists(f"{root}/dev/kfd"):
        return []
    found = []
    folder = f"{root}/sys/class/kfd/kfd/topology/nodes"
    for node in numbered(folder, ""):
        if read_text(f"{folder}/{node}/gpu_id") in (None, "", "0"):
            continue
        lines = (read_text(f"{folder}/{node}/properties") or "").splitlines()
        facts = {key: number(value) for key, _, value in (line.partition(" ") for line in lines)}
        place = facts.get("location_id", 0)  # the kernel's pci_dev_id(): bus, then 5 bits device, 3 bits function
        address = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        found.append(_Device(address if "location_id" in facts else ""))
    return found


def _gaudi(root: str) -> list[_Device]:
    """Habana's devices among /dev/accel/accelN, which any driver of the accel subsystem (Intel's, AMD's NPUs) uses.

    They are ordered by module number, by which HABANA_VISIBLE_MODULES counts.
    """
    folder = f"{root}/sys/class/accel"
    found = {}
    for index in numbered(f"{root}/dev/accel", "accel"):
        device = f"{folder}/accel{index}/device"
        if read_text(f"{device}/vendor") == "0x1da3":
            module = read_text(f"{device}/module_id") or str(index)
            address = read_text(f"{device}/pci_addr") or os.path.basename(os.path.realpath(device))
            found[number(module)] = _Device(address)
    return [found[module] for module in sorted(found)] or [_Device()] * len(numbered(f"{root}/dev", "hl"))


def _intel(root: str) -> list[_Device]:
    """Intel's GPUs by their render nodes; one with two tiles counts once, though Level Zero may show two."""
    found = []
    for index in numbered(f"{root}/dev/dri", "renderD"):
        device = f"{root}/sys/class/drm/renderD{index}/device"
        if read_text(f"{device}/vendor") == "0x8086":
            found.append(_Device(os.path.basename(os.path.realpath(device))))
    return sorted(found, key=lambda device: device.address)


# Finders for accelerators for which numbered files are not enough, with the sources of what the kernel shows:
#   cuda: driver's README (/dev/nvidiaN, /proc/driver/nvidia); amdkfd's kfd_topology.c in Linux
#   hpu:  drivers/accel in Linux, sysfs-driver-habanalabs; /dev/hlN before Linux 6.2
#   xpu:  Intel's i915 and xe drivers are DRM drivers
_FIND = {"cuda": _cuda, "hpu": _gaudi, "xpu": _intel}
_ALSO_VISIBLE = {"cuda": _rocm_variables}
# In the order of detection: the first accelerator that has devices is used.
ACCELERATORS = {
    name: AcceleratorDevices(
        vendor.visible,
        _numbered_files(*vendor.device_files) if vendor.device_files else _FIND.get(name),
        _ALSO_VISIBLE.get(name),
        name == HOST,
    )
    for name, vendor in VENDORS.items()
}
