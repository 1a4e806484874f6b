# SPDX-License-Identifier: Apache-2.0
"""The reader of the machine: /sys/devices/system/{cpu,node}, /proc and cpusets, live or recorded.

Plain system calls rather than pathlib or open(): this is on the start-up path of every launch, and a large
machine has a few thousand of these files.
"""

from __future__ import annotations

import os
from dataclasses import replace

from anyaccel.errors import UsageError
from anyaccel.topology.files import listed, names, number, numbered, numbers, read_text
from anyaccel.topology.model import Cpu, Machine, NumaNode

# cgroup v1, v2, v1 of old kernels, v1 mounted without prefixes.
_CPUSET_CPUS = ("cpuset.effective_cpus", "cpuset.cpus.effective", "cpuset.cpus", "cpus")
_CPUSET_MEMS = ("cpuset.effective_mems", "cpuset.mems.effective", "cpuset.mems", "mems")
# Beside `cpu_core`: folder of the performance counters that only this kind of core has.
_OTHER_KINDS = {"cpu_atom": "efficiency", "cpu_lowpower": "low power"}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def read_machine(root: Path | str | None = None) -> Machine:
    """The machine this process runs on, or a recorded one.

    Args:
        root: folder with `sys/` and `proc/` of a recorded machine. There the allowed CPUs come from
            `proc/self/status`; live, from `sched_getaffinity`. What is missing in a recording is not
            restricted.

    Anything may be missing: without topology files each CPU is its own core, without a node directory there
    is one node 0. Offline CPUs and nodes are left out. Caches and devices are read apart, by
    `anyaccel.topology.details`: a launch does without them.
    """
    base = "" if root is None else os.fspath(root)
    status = _status(f"{base}/proc/self/status")
    cpu_folder = f"{base}/sys/devices/system/cpu"
    if root is None:
        affinity = os.sched_getaffinity(0)
        # Containers may mask sysfs (lxcfs renumbers it); what the scheduler names exists in any case.
        online = tuple(sorted(affinity.union(_online_cpus(cpu_folder))))
    else:
        online = _online_cpus(cpu_folder) or (0,)
        affinity = set(numbers(status.get("Cpus_allowed_list")) or online)
    # Live, the kernel's own answers have the cpuset in them; a recording may lack those, or have them from outside.
    cpuset, cpuset_mems = _cpuset(base) if base else (None, None)
    # A cpuset that leaves nothing is not the one of this process.
    affinity = affinity.intersection(cpuset or affinity) or affinity
    usable = tuple(cpu for cpu in online if cpu in affinity)

    node_folder = f"{base}/sys/devices/system/node"
    nodes = _nodes(node_folder, set(online))
    numa = bool(nodes)
    if not nodes:
        nodes = (NumaNode(0, online, 0),)
    if set(online).difference(*(node.cpus for node in nodes)):
        nodes = _with_hidden(node_folder, cpu_folder, nodes, online)
    if len(nodes) == 1:
        # The node's own figure may leave out memory that was added to a virtual machine while it ran.
        memory = _meminfo(f"{base}/proc/meminfo")
        if memory > nodes[0].memory_bytes and _has_all_memory(node_folder, nodes[0].id):
            nodes = (replace(nodes[0], memory_bytes=memory),)
    if any(node.memory_bytes and not node.cpus for node in nodes):
        from anyaccel.topology.memory import detect_memory_kinds  # most machines have no such node

        nodes = detect_memory_kinds(nodes, base)
    node_of = {cpu: node.id for node in reversed(nodes) for cpu in node.cpus}

    cpus = _cpus(cpu_folder, online, node_of)
    kinds = _core_kinds(f"{base}/sys/devices", cpus)
    if kinds:
        cpus = tuple(replace(cpu, kind=kinds.get(cpu.core, "")) for cpu in cpus)
    mems = numbers(status.get("Mems_allowed_list"))
    usable_memory = tuple(
        node.id
        for node in nodes
        if node.memory_bytes and all(limit is None or node.id in limit for limit in (mems, cpuset_mems))
    )
    isolated = numbers(read_text(f"{cpu_folder}/isolated")) or ()
    return Machine(cpus, nodes, usable, usable_memory if numa else (), _cpu_quota(base), isolated)


def check_recording(root: Path | str) -> None:
    """Raise UsageError where `root` is not the folder of a recorded machine, saying what was looked for."""
    base = os.fspath(root)
    wanted = f"{base.rstrip('/') or '/'}/sys/devices/system/cpu"
    if numbered(wanted, "cpu") or _online_cpus(wanted):
        return
    if not os.path.isdir(base):
        raise UsageError(f"--sysfs-root {base!r} is not a folder; give one that has sys/ and proc/ of a machine")
    inside = [name for name in names(base) if numbered(f"{base}/{name}/sys/devices/system/cpu", "cpu")]
    hint = f"did you mean {base.rstrip('/')}/{inside[0]}?" if inside else "give the folder that has sys/ and proc/"
    raise UsageError(f"--sysfs-root {base!r} has no recorded machine: there are no CPUs in {wanted}; {hint}")


def _status(path: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in (read_text(path) or "").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _meminfo(path: str, field: str = "MemTotal:") -> int:
    """Bytes of memory in /proc/meminfo, or in a node's meminfo, whose lines start with "Node N"."""
    for line in (read_text(path) or "").splitlines():
        words = line.split()
        if field in words[:-1]:
            return number(words[words.index(field) + 1]) * 1024
    return 0


def _cpuset(base: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """CPUs and memory nodes of the cgroup (v1 or v2) of the recorded process; None where there is no cpuset."""
    for folder in _cgroup_folders(base, "cpuset"):
        cpus = _first_list(folder, _CPUSET_CPUS)
        if cpus:
            return cpus, _first_list(folder, _CPUSET_MEMS)
    return None, None


def _cpu_quota(base: str) -> float | None:
    """How many CPUs' time the cgroup of this process, and those above it, may use; None without a limit."""
    quotas = []
    for folder in _cgroup_folders(base, "cpu"):
        words = (read_text(f"{folder}/cpu.max") or "").split()
        quota = number(words[0] if words else read_text(f"{folder}/cpu.cfs_quota_us"))
        period = number(words[1] if len(words) > 1 else read_text(f"{folder}/cpu.cfs_period_us"))
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroup_folders(base: str, controller: str) -> Iterator[str]:
    """The folders of this process's cgroup and of those above it, the innermost first."""
    for path, mounts in _cgroup_places(base, controller):
        if ".." in path:
            continue  # a cgroup outside of the part of the hierarchy that this process sees
        # A container sees its own cgroup as the root, a cgroup without the controller has that of its parent.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            for mount in mounts:
                yield "/".join((base + mount, *parts[:depth]))


def _cgroup_places(base: str, controller: str) -> list[tuple[str, list[str]]]:
    """Where to look: the path of a cgroup, and the folders where its hierarchy may be mounted."""
    v1, v2 = [f"/sys/fs/cgroup/{controller}"], ["/sys/fs/cgroup"]
    if controller == "cpuset":
        v1.append("/dev/cpuset")
    for line in (read_text(f"{base}/proc/mounts") or "").splitlines():
        _, folder, kind, options, *_ = [*line.split(), "", "", "", ""]
        if kind == "cgroup2":
            v2.insert(0, folder)
        elif kind == controller or (kind == "cgroup" and controller in options.split(",")):
            v1.insert(0, folder)
    places = []
    for line in (read_text(f"{base}/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            places.append((path, v1))
        elif not controllers:
            places.append((path, v2))
    return places or [(read_text(f"{base}/proc/self/cpuset") or "", v1 + v2)]  # all that some recordings have


def _first_list(folder: str, candidates: tuple[str, ...]) -> tuple[int, ...] | None:
    return next((found for name in candidates if (found := numbers(read_text(f"{folder}/{name}")))), None)


def _core_kinds(folder: str, cpus: tuple[Cpu, ...]) -> dict[int, str]:
    """Kind by core where cores differ: as x86 says which counters a CPU has, else as the scheduler rates them."""
    rated = f"{folder}/system/cpu/cpu"
    performance = numbers(read_text(f"{folder}/cpu_core/cpus"))
    if performance is not None:
        kinds = dict.fromkeys(performance, "performance")
        for counters, kind in _OTHER_KINDS.items():
            kinds.update(dict.fromkeys(numbers(read_text(f"{folder}/{counters}/cpus")) or (), kind))
        return kinds
    # On x86 the counters tell it, so that a launch there need not read a rate of each core.
    live = folder == "/sys/devices"
    if (live and os.uname().machine == "x86_64") or read_text(f"{rated}{cpus[0].id}/cpu_capacity") is None:
        return {}
    rates = {core: number(read_text(f"{rated}{core}/cpu_capacity")) for core in {cpu.core for cpu in cpus}}
    # Cores of one design differ a little in what they may clock.
    limit = max(rates.values()) * 3 // 4
    if min(rates.values()) >= limit:
        return {}
    return {core: "performance" if rate >= limit else "efficiency" for core, rate in rates.items()}


def _online_cpus(folder: str) -> tuple[int, ...]:
    online = numbers(read_text(f"{folder}/online"))
    if online:
        return online
    # A dump made with `cp` may lack the list; a CPU without `online` (the boot CPU) cannot be taken offline.
    found = numbered(folder, "cpu")
    return tuple(cpu for cpu in found if read_text(f"{folder}/cpu{cpu}/online") != "0")


def _cpus(folder: str, online: tuple[int, ...], node_of: dict[int, int]) -> tuple[Cpu, ...]:
    known = set(online)
    keys: dict[int, tuple[int, int, int]] = {}
    siblings: dict[int, tuple[int, ...]] = {}
    for cpu in online:
        topology = f"{folder}/cpu{cpu}/topology/"
        package, die, core = (read_text(topology + name) for name in ("physical_package_id", "die_id", "core_id"))
        keys[cpu] = (number(package), number(die), number(core))
        if cpu in siblings:
            continue
        threads = _siblings(topology)
        if threads is None and core is not None:
            continue  # grouped by `keys` below
        group = tuple(other for other in threads or () if other in known and other not in siblings)
        if cpu not in group:
            group = (cpu,)
        siblings.update(dict.fromkeys(group, group))
    unlisted = [cpu for cpu in online if cpu not in siblings]
    for cpu in unlisted:
        siblings[cpu] = tuple(other for other in unlisted if keys[other] == keys[cpu])
    return tuple(Cpu(cpu, *keys[cpu], node=node_of[cpu], siblings=siblings[cpu]) for cpu in online)


def _siblings(topology: str) -> tuple[int, ...] | None:
    for name in ("core_cpus", "thread_siblings"):
        found = listed(f"{topology}{name}_list", f"{topology}{name}")
        if found:
            return found
    return None


def _nodes(folder: str, online: set[int]) -> tuple[NumaNode, ...]:
    ids = numbered(folder, "node")
    shown = numbers(read_text(f"{folder}/online"))
    if shown is not None:
        ids = tuple(node for node in ids if node in shown)
    nodes = []
    for node in ids:
        path = f"{folder}/node{node}/"
        cpus = tuple(cpu for cpu in listed(path + "cpulist", path + "cpumap") or () if cpu in online)
        distances = [number(word) for word in (read_text(path + "distance") or "").split()]
        # The table has one column for each online node, in order, or for each that there may be; another length
        # cannot be attributed.
        columns = ids if len(distances) == len(ids) else _possible_nodes(folder)
        table = dict(zip(columns, distances, strict=True)) if len(distances) == len(columns) else {}
        nodes.append(NumaNode(node, cpus, _meminfo(path + "meminfo"), table))
    return tuple(nodes)


def _possible_nodes(folder: str) -> tuple[int, ...]:
    return numbers(read_text(f"{folder}/possible")) or ()


def _has_all_memory(folder: str, node: int) -> bool:
    """Whether no other node has memory, also none that is not shown."""
    return set(numbers(read_text(f"{folder}/has_memory")) or ()) <= {node}


def _with_hidden(
    folder: str, cpu_folder: str, nodes: tuple[NumaNode, ...], online: tuple[int, ...]
) -> tuple[NumaNode, ...]:
    """The nodes, with every online CPU in one of them.

    A node that is off-line is not shown, and its CPUs may be online: they are far from the memory of the others. Those
    of a package come to a node of their own, whose memory nobody tells, where the kernel knows of nodes that it does
    not show, or shows none of that package; else to the node of their package.
    """
    listed = {cpu: node for node in nodes for cpu in node.cpus}
    shown = {node.id for node in nodes}
    spare = [node for node in _possible_nodes(folder) if node not in shown]
    if not listed and not spare:  # this kernel does not say where CPUs are
        return (replace(nodes[0], cpus=online), *nodes[1:])
    packages: dict[int, list[int]] = {}
    for cpu in online:
        package = number(read_text(f"{cpu_folder}/cpu{cpu}/topology/physical_package_id"))
        packages.setdefault(package, []).append(cpu)
    found = {node.id: node for node in nodes}
    for _, members in sorted(packages.items()):
        own = [cpu for cpu in members if cpu not in listed]
        if not own:
            continue
        home = next((listed[cpu] for cpu in members if cpu in listed), None)
        if home is not None and not spare:
            found[home.id] = replace(home, cpus=tuple(sorted([*found[home.id].cpus, *own])))
            continue
        node = spare.pop(0) if spare else max(found) + 1
        table = {other.id: other.distances[node] for other in nodes if node in other.distances}
        found[node] = NumaNode(node, tuple(own), 0, {**table, node: 10} if table else {})
    return tuple(found[node] for node in sorted(found))
