# SPDX-License-Identifier: Apache-2.0
"""The only reader of the machine: /sys/devices/system/{cpu,node} and /proc, live or recorded.

Plain system calls rather than pathlib or open(): this is on the start-up path of every launch, and a large
machine has a few thousand of these files.
"""

from __future__ import annotations

import os
from dataclasses import replace

from anyaccel.topology.model import Cpu, Machine, NumaNode, parse_cpu_list

TYPE_CHECKING = False  # type checkers know the name; importing typing for it takes 7 ms of each launch
if TYPE_CHECKING:
    from pathlib import Path


def read_machine(root: Path | None = None) -> Machine:
    """The machine this process runs on, or a recorded one.

    Args:
        root: folder with `sys/` and `proc/` of a recorded machine. There the allowed CPUs come from
            `proc/self/status`; live, from `sched_getaffinity`. What is missing in a recording is not
            restricted.

    Anything may be missing: without topology files each CPU is its own core, without a node directory there
    is one node 0. Offline CPUs and nodes are left out.
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
        affinity = set(_numbers(status.get("Cpus_allowed_list")) or online)
    usable = tuple(cpu for cpu in online if cpu in affinity)

    nodes = _nodes(f"{base}/sys/devices/system/node", set(online))
    numa = bool(nodes)
    if not nodes:
        nodes = (NumaNode(0, online, 0),)
    if len(nodes) == 1:
        # The node's own figure may leave out memory that was added to a virtual machine while it ran.
        nodes = (replace(nodes[0], memory_bytes=max(nodes[0].memory_bytes, _meminfo(f"{base}/proc/meminfo"))),)
    node_of = {cpu: node.id for node in reversed(nodes) for cpu in node.cpus}

    cpus = _cpus(cpu_folder, online, node_of, nodes[0].id)
    mems = _numbers(status.get("Mems_allowed_list"))
    memory = tuple(node.id for node in nodes if node.memory_bytes and (mems is None or node.id in mems))
    return Machine(cpus, nodes, usable, memory if numa else ())


def _read(path: str) -> str | None:
    """Text of a small file; None where it is missing or cannot be read (an offline CPU, a masked file)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace").strip()


def _numbers(text: str | None) -> tuple[int, ...] | None:
    """A kernel list; None where it is missing or not a list."""
    if text is None:
        return None
    try:
        return tuple(sorted(set(parse_cpu_list(text))))
    except ValueError:
        return None


def _number(text: str | None) -> int:
    """A kernel number; 0 where it is missing, not a number or -1 (the kernel's "unknown")."""
    try:
        return max(0, int(text or 0))
    except ValueError:
        return 0


def _numbered(folder: str, prefix: str) -> tuple[int, ...]:
    """The numbers N of the entries `prefix`N of a folder."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return ()
    tails = (name[len(prefix) :] for name in names if name.startswith(prefix))
    return tuple(sorted(int(tail) for tail in tails if tail.isascii() and tail.isdigit()))


def _status(path: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in (_read(path) or "").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _meminfo(path: str, field: str = "MemTotal:") -> int:
    """Bytes of memory in /proc/meminfo, or in a node's meminfo, whose lines start with "Node N"."""
    for line in (_read(path) or "").splitlines():
        words = line.split()
        if field in words[:-1]:
            return _number(words[words.index(field) + 1]) * 1024
    return 0


def _online_cpus(folder: str) -> tuple[int, ...]:
    listed = _numbers(_read(f"{folder}/online"))
    if listed:
        return listed
    # A dump made with `cp` may lack the list; a CPU without `online` (the boot CPU) cannot be taken offline.
    found = _numbered(folder, "cpu")
    return tuple(cpu for cpu in found if _read(f"{folder}/cpu{cpu}/online") != "0")


def _cpus(folder: str, online: tuple[int, ...], node_of: dict[int, int], default_node: int) -> tuple[Cpu, ...]:
    known = set(online)
    keys: dict[int, tuple[int, int, int]] = {}
    siblings: dict[int, tuple[int, ...]] = {}
    for cpu in online:
        topology = f"{folder}/cpu{cpu}/topology/"
        package, die, core = (_read(topology + name) for name in ("physical_package_id", "die_id", "core_id"))
        keys[cpu] = (_number(package), _number(die), _number(core))
        if cpu in siblings:
            continue
        listed = _numbers(_read(topology + "core_cpus_list") or _read(topology + "thread_siblings_list"))
        if listed is None and core is not None:
            continue  # told apart by their keys below
        group = tuple(other for other in listed or () if other in known)
        if cpu not in group:
            group = (cpu,)
        siblings.update(dict.fromkeys(group, group))
    unlisted = [cpu for cpu in online if cpu not in siblings]
    for cpu in unlisted:
        siblings[cpu] = tuple(other for other in unlisted if keys[other] == keys[cpu])
    return tuple(Cpu(cpu, *keys[cpu], node=node_of.get(cpu, default_node), siblings=siblings[cpu]) for cpu in online)


def _nodes(folder: str, online: set[int]) -> tuple[NumaNode, ...]:
    ids = _numbered(folder, "node")
    listed = _numbers(_read(f"{folder}/online"))
    if listed is not None:
        ids = tuple(node for node in ids if node in listed)
    nodes = []
    for node in ids:
        path = f"{folder}/node{node}/"
        cpus = tuple(cpu for cpu in _numbers(_read(path + "cpulist")) or () if cpu in online)
        distances = [_number(word) for word in (_read(path + "distance") or "").split()]
        # The table has one column for each online node, in order; another length cannot be attributed.
        table = dict(zip(ids, distances, strict=True)) if len(distances) == len(ids) else {}
        nodes.append(NumaNode(node, cpus, _meminfo(path + "meminfo"), table))
    return tuple(nodes)
