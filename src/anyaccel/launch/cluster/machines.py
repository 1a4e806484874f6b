# SPDX-License-Identifier: Apache-2.0
"""Finds hosts of a job that are one machine under several names: `localhost` and its host name, or containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.launch.cluster.address import are_this_host, is_this_host, resolves_to_loopback
from anyaccel.launch.cluster.task import Task
from anyaccel.topology import format_cpu_list


def same_machines(task: Task, ready: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Groups of hosts, by number, that are one machine and may use the same CPUs of it.

    Args:
        ready: the READY data of an agent of each host: "machine", which is equal for hosts that are one machine, ""
            if unknown; and "cpus", the CPUs that it may use.

    Raises:
        UsageError: workers are to be bound, and two such hosts have only some of their CPUs in common.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for node in sorted(ready):
        if ready[node].get("machine"):
            groups.setdefault((ready[node]["machine"], tuple(ready[node]["cpus"])), []).append(node)
    found = list(groups.items())
    for index, ((machine, cpus), nodes) in enumerate(found):
        for (other, others_cpus), others_nodes in found[index + 1 :]:
            shared = set(cpus).intersection(others_cpus)
            if machine == other and shared and task.options.bind_cores:
                names = f"{task.hosts[nodes[0]].name} and {task.hosts[others_nodes[0]].name}"
                raise UsageError(
                    f"hosts {names} are one machine and share CPU {format_cpu_list(sorted(shared))}, but each may use "
                    "others too; give them the same CPUs (one cpuset), or none in common"
                )
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def names_of_this_machine(names: Sequence[str], node: int, master: str) -> list[int]:
    """Hosts of a job, by number, that are the machine of this process; for --no_ssh, where hosts cannot be asked.

    Args:
        names: the names of all hosts; "" if unknown.
        node: number of this process's host.
        master: address of rank 0, of host 0.

    Raises:
        UsageError: a name means another machine on each of them, and may mean this one.
    """
    if resolves_to_loopback(master):
        return list(range(len(names)))  # rank 0 is reached through the loopback
    machines = [name.rpartition("@")[2] for name in names]
    asked = [machine for machine in machines if machine]
    here = dict(zip(asked, are_this_host(asked), strict=True))
    relative = {machine for machine in asked if here[machine] and resolves_to_loopback(machine)}
    found = []
    for number, machine in enumerate(machines):
        if number == node or (machine in here and machine not in relative and here[machine]):
            found.append(number)
        elif machine in relative and (number == 0 or machines[node] in relative):
            if machines[node] in relative or is_this_host(master):
                found.append(number)
        elif machine in relative:
            raise UsageError(
                f"host {names[number]} means another machine on each host, and may be the same one as host "
                f"{names[node]}; write the name of its machine into the hostfile"
            )
    return found


def host_identity() -> str:
    """Equal for two processes if and only if they can map each other's shared memory."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers of one host share the boot id, but each may have a /dev/shm of its own.
    try:
        info = Path("/dev/shm").stat()
        shm = f"{info.st_dev}:{info.st_ino}"
    except OSError:
        shm = "-"
    return f"{boot_id}:{shm}"
