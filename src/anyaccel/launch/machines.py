# SPDX-License-Identifier: Apache-2.0
"""Which hosts of a job are one machine under several names: `localhost` and its host name, or containers."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.errors import UsageError
from anyaccel.launch.task import Task
from anyaccel.topology import format_cpu_list

TYPE_CHECKING = False  # as everywhere in this package: importing typing takes 7 ms
if TYPE_CHECKING:
    from typing import Any


def same_machines(task: Task, ready: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Groups of hosts that are one machine and may use the same CPUs of it, by number, ascending.

    Args:
        ready: what an agent of each host has said: "machine", equal for two hosts where they are one, "" where it is
            unknown; "cpus", the CPUs that it may use.

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
