# SPDX-License-Identifier: Apache-2.0
"""What the memory of nodes without cores is: HBM, CXL, persistent memory, that of a GPU. Read where there are such.

Linux has no file that says it. What it has, from the most to the least certain: the driver that brought the memory
(a DAX device, NVIDIA's), the bandwidth that the firmware promises (Documentation/admin-guide/mm/numaperf.rst), the
tier that the kernel sorted it into (sysfs-kernel-mm-memory-tiers), and the name of processors that have HBM on the
package. Where none of them tells, the kind stays unknown.
"""

from __future__ import annotations

import os
from dataclasses import replace

from anyaccel.topology.files import names, number, numbered, numbers, read_text
from anyaccel.topology.model import NumaNode

# HBM gives at least twice the bandwidth of the memory channels beside it, CXL at most half.
_FASTER, _SLOWER = 1.5, 0.67
# Bytes of HBM on the package of each Xeon Max, divided among its nodes.
_XEON_MAX_HBM = 64 << 30


def detect_memory_kinds(nodes: tuple[NumaNode, ...], base: str) -> tuple[NumaNode, ...]:
    """The nodes, with kind and initiators of those that have memory and no cores.

    Args:
        base: folder that has `sys/` and `proc/`; "" for this machine.
    """
    folder = f"{base}/sys/devices/system/node"
    with_cores = [node.id for node in nodes if node.cpus]
    bandwidth = {node.id: _bandwidth(f"{folder}/node{node.id}") for node in nodes}
    drivers = {**_dax_nodes(base), **_gpu_nodes(base)}
    tiers = _tiers(f"{base}/sys/devices/virtual/memory_tiering")
    usual_tier = min((tiers[node] for node in with_cores if node in tiers), default=0)
    model = cpu_model(base)

    def tell(node: NumaNode) -> tuple[str, str]:
        if node.id in drivers:
            return drivers[node.id]
        own = bandwidth[node.id]
        near = [other for other in with_cores if other in node.initiators] or with_cores
        usual = max((bandwidth[other] for other in near), default=0)
        if own and usual:
            evidence = f"its bandwidth is {own / usual:.2g} times that of the memory at the cores"
            if own >= _FASTER * usual:
                return "hbm", evidence
            if own <= _SLOWER * usual:
                return "slow", evidence
        # A higher tier tells nothing: before Linux 6.7 whatever came through DAX was put there.
        if tiers.get(node.id, usual_tier) < usual_tier:
            return "hbm", f"memory tier {tiers[node.id]} is faster than that of the cores, {usual_tier}"
        if "Xeon Phi" in model or ("Xeon(R) CPU Max" in model and _is_xeon_max_share(node.memory_bytes)):
            return "hbm", f"{model} has it on the package"
        return "", ""

    found = []
    for node in nodes:
        if node.cpus or not node.memory_bytes:
            found.append(node)
            continue
        # Cores that are switched off are still linked there: the memory is the usual one.
        offline = numbered(f"{folder}/node{node.id}", "cpu")
        if offline:
            found.append(replace(node, offline_cpus=offline))
            continue
        node = replace(node, initiators=_initiators(f"{folder}/node{node.id}"))
        kind, evidence = tell(node)
        found.append(replace(node, memory_kind=kind, memory_evidence=evidence))
    return tuple(found)


def cpu_model(base: str) -> str:
    """Name of the first CPU as its maker gives it; "" where the kernel shows none."""
    # All of this file takes long on a large machine: it asks every core for its frequency.
    text = read_text(f"{base}/proc/cpuinfo", limit=4096) or ""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("model name", "cpu model"):
            return " ".join(value.split())
    return ""


def _is_xeon_max_share(size: int) -> bool:
    return any(0.9 <= size * parts / _XEON_MAX_HBM <= 1.01 for parts in (1, 2, 4))


def _access(node_folder: str) -> list[str]:
    """Folders of the initiators that can access this memory, CPUs first: access0 may be about devices."""
    return [f"{node_folder}/{name}/initiators" for name in ("access1", "access0")]


def _bandwidth(node_folder: str) -> int:
    """MB/s that the firmware promises the closest CPUs for reading; 0 where it says nothing."""
    return next(filter(None, (number(read_text(f"{path}/read_bandwidth")) for path in _access(node_folder))), 0)


def _initiators(node_folder: str) -> tuple[int, ...]:
    return next(filter(None, (numbered(path, "node") for path in _access(node_folder))), ())


def _dax_nodes(base: str) -> dict[int, tuple[str, str]]:
    """Kind by node of memory that a DAX device brought, and that its place in the device tree names."""
    found = {}
    folder = f"{base}/sys/bus/dax/devices"
    for name in names(folder):
        node = numbers(read_text(f"{folder}/{name}/target_node"))
        place = os.path.realpath(f"{folder}/{name}")
        if not node:
            continue
        if "/ndbus" in place:
            found[node[0]] = ("pmem", f"DAX device {name} is on an NVDIMM bus")
        elif "/ACPI0017:" in place or "/dax_region" in place:
            found[node[0]] = ("cxl", f"DAX device {name} is on the CXL bus")
        # Others (hmem) are what the firmware set aside for special use, of any kind.
    return found


def _gpu_nodes(base: str) -> dict[int, tuple[str, str]]:
    found = {}
    folder = f"{base}/proc/driver/nvidia/gpus"
    for name in names(folder):
        for line in (read_text(f"{folder}/{name}/numa_status") or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Node" and value.strip().isdigit():
                found[int(value)] = ("gpu", f"NVIDIA's driver names it as that of {name}")
    return found


def _tiers(folder: str) -> dict[int, int]:
    """Tier by node; a lower one is faster."""
    lists = {
        tier: numbers(read_text(f"{folder}/memory_tier{tier}/nodelist")) for tier in numbered(folder, "memory_tier")
    }
    return {node: tier for tier, nodes in lists.items() for node in nodes or ()}
