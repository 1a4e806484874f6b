# SPDX-License-Identifier: Apache-2.0
"""What a machine has beside CPUs and nodes: caches, accelerators on PCI, CPUs that are off-line.

Read apart from `read_machine`: a launch does without, and a large machine has some ten thousand of these files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from anyaccel.topology.files import listed, names, number, numbered, numbers, read_text
from anyaccel.topology.memory import cpu_model
from anyaccel.topology.model import Machine

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Base classes of the PCI code and ID assignment specification; of the class "processor" only the co-processors.
_PCI_KINDS = {"03": "display", "12": "accelerator", "0b40": "accelerator"}
# Consoles of servers and virtual machines: they draw a screen and compute nothing.
_CONSOLES = {"0x1a03", "0x102b", "0x1234", "0x1013", "0x1b36", "0x1af4", "0x15ad", "0x1414", "0x80ee"}
_VENDORS = {
    "0x1002": "AMD",
    "0x10de": "NVIDIA",
    "0x102b": "Matrox",
    "0x1a03": "ASPEED",
    "0x1da3": "Habana",
    "0x1e36": "Enflame",
    "0x1ed5": "Moore Threads",
    "0x19e5": "Huawei",
    "0x8086": "Intel",
    "0xcabc": "Cambricon",
}


@dataclass(frozen=True)
class Cache:
    """One cache.

    Attributes:
        level: 1 is the closest to the core.
        type: "data", "instruction" or "unified".
        size_bytes: 0 where the kernel does not say.
        cpus: online logical CPUs that share it, ascending.
    """

    level: int
    type: str
    size_bytes: int
    cpus: tuple[int, ...]

    @property
    def name(self) -> str:
        """What people call it: L1d, L1i, L2."""
        return f"L{self.level}{self.type[0] if self.type in ('data', 'instruction') else ''}"


@dataclass(frozen=True)
class PciDevice:
    """A graphics card or another accelerator on PCI.

    Attributes:
        address: as in `lspci -D`; ascending addresses are the order in which CUDA counts by bus.
        vendor: PCI number of the maker, such as "0x10de".
        device: the maker's number of the model, such as "0x2330".
        kind: "display" or "accelerator", by PCI class.
        node: NUMA node it is attached to; None where the firmware does not say.
        driver: name of the kernel driver that has it; "" for none.
    """

    address: str
    vendor: str
    device: str
    kind: str
    node: int | None
    driver: str = ""

    @property
    def is_console(self) -> bool:
        """Whether it only draws the screen of a server or of a virtual machine."""
        return self.kind == "display" and self.vendor in _CONSOLES

    @property
    def is_integrated(self) -> bool:
        """Whether it is the graphics unit of an Intel processor, which is at one address on all of them."""
        return self.kind == "display" and self.vendor == "0x8086" and self.address == "0000:00:02.0"

    @property
    def label(self) -> str:
        """Maker and model as far as they are known here."""
        maker = _VENDORS.get(self.vendor, self.vendor)
        return f"{maker} {self.device.removeprefix('0x')}".strip() or "model not known"


@dataclass(frozen=True)
class Details:
    """Everything of a machine that a launch does without.

    Attributes:
        model_name: the first CPU's name; "" where the kernel shows none.
        caches: by level, data before instruction, and CPU.
        devices: by address.
        offline_cpus: CPUs that are there and switched off, ascending.
        memory_caches: size in bytes of the memory-side cache by node, such as HBM in cache mode.
    """

    model_name: str = ""
    caches: tuple[Cache, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    offline_cpus: tuple[int, ...] = ()
    memory_caches: dict[int, int] = field(default_factory=dict, hash=False)


def read_details(machine: Machine, root: Path | str | None = None) -> Details:
    """The details of a machine that `read_machine(root)` gave."""
    base = "" if root is None else os.fspath(root)
    return Details(
        cpu_model(base),
        read_caches(machine, root),
        read_devices(root),
        _offline(f"{base}/sys/devices/system/cpu", {cpu.id for cpu in machine.cpus}),
        _memory_caches(machine, f"{base}/sys/devices/system/node"),
    )


def read_caches(machine: Machine, root: Path | str | None = None) -> tuple[Cache, ...]:
    """All caches of the online CPUs; empty where the kernel shows none, as in many virtual machines."""
    base = "" if root is None else os.fspath(root)
    online = {cpu.id for cpu in machine.cpus}
    found: dict[tuple[int, str, tuple[int, ...]], Cache] = {}
    covered: set[tuple[int, int]] = set()
    for cpu in machine.cpus:
        folder = f"{base}/sys/devices/system/cpu/cpu{cpu.id}/cache"
        for index in numbered(folder, "index"):
            if (index, cpu.id) in covered:
                continue
            path = f"{folder}/index{index}/"
            level, kind = number(read_text(path + "level")), (read_text(path + "type") or "unified").lower()
            if not level:
                continue
            sharers = listed(path + "shared_cpu_list", path + "shared_cpu_map") or ()
            cpus = tuple(sorted({cpu.id, *(other for other in sharers if other in online)}))
            covered.update((index, other) for other in cpus)
            cache = Cache(level, kind, parse_size(read_text(path + "size")), cpus)
            found.setdefault((level, kind, cpus), cache)
    return tuple(sorted(found.values(), key=lambda cache: (cache.level, cache.type, cache.cpus)))


def read_devices(root: Path | str | None = None) -> tuple[PciDevice, ...]:
    """Graphics cards and accelerators on PCI, by address; consoles of servers are among them."""
    base = "" if root is None else os.fspath(root)
    folder = f"{base}/sys/bus/pci/devices"
    found = []
    for address in sorted(names(folder), key=_address_order):
        path = f"{folder}/{address}/"
        code = (read_text(path + "class") or "").removeprefix("0x")
        kind = next((kind for prefix, kind in _PCI_KINDS.items() if code.startswith(prefix)), None)
        if kind is None:
            continue
        node = numbers(read_text(path + "numa_node"))  # -1 is no list: not known
        vendor, device = (read_text(path + name) or "" for name in ("vendor", "device"))
        found.append(PciDevice(address, vendor, device, kind, node[0] if node else None, _driver(path)))
    return tuple(found)


def _driver(device_folder: str) -> str:
    try:
        # The link alone says it: a recording may lack what it leads to.
        return Path(device_folder, "driver").readlink().name
    except OSError:
        return ""


def parse_size(text: str | None) -> int:
    """Bytes of a size such as "32K"; 0 where there is none."""
    text = (text or "").strip().upper().removesuffix("B")
    unit = _UNITS.get(text[-1:], 1)
    return number(text.rstrip("KMG")) * unit


def _address_order(address: str) -> tuple[int, ...] | tuple[int, str]:
    """A domain may have more than four digits, so that the text alone does not sort."""
    try:
        return tuple(int(part, 16) for part in address.replace(".", ":").split(":"))
    except ValueError:
        return (1 << 32, address)


def _offline(folder: str, online: set[int]) -> tuple[int, ...]:
    # `present` are those that are plugged in; `possible` may be many more in a virtual machine.
    there = numbers(read_text(f"{folder}/present")) or numbered(folder, "cpu")
    return tuple(cpu for cpu in there if cpu not in online)


def _memory_caches(machine: Machine, folder: str) -> dict[int, int]:
    found = {}
    for node in machine.nodes:
        path = f"{folder}/node{node.id}/memory_side_cache"
        size = sum(parse_size(read_text(f"{path}/index{index}/size")) for index in numbered(path, "index"))
        if size:
            found[node.id] = size
    return found
