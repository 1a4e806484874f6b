# SPDX-License-Identifier: Apache-2.0
"""The part of `anyaccel run` for several hosts, which is imported only when there are some."""

from __future__ import annotations

import json
import shlex
import sys

from anyaccel.launch.cluster.cluster import ClusterLaunch, ClusterOptions, prepare, run_cluster
from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.terminal import fitted, styled, table_width
from anyaccel.topology.model import counted, format_cpu_list


def show(options: LaunchOptions, cluster: ClusterOptions, as_json: bool) -> None:
    """Print which hosts would take part and how they would be reached; none of them is contacted."""
    launch = prepare(options, cluster)
    if as_json:
        print(json.dumps(_to_dict(launch), indent=2))
        return
    task = launch.task
    how = launch.runner.name if launch.runner else "no launcher, this host only"
    workers, hosts = counted(task.world_size, "worker"), counted(len(task.hosts), "host")
    lines = [f"job: {workers} on {hosts}, by {how}"]
    for node, host in enumerate(task.hosts):
        first = task.place(node).first_rank
        ranks = format_cpu_list(range(first, first + len(host.slots)))
        lines.append(f"  host {node}: {host.name}, slots {format_cpu_list(host.slots)}, ranks {ranks}")
    lines += [
        f"  rank 0 listens on {task.options.master_addr or 'the address of the first host that the others see'}",
        f"  variables that travel: {', '.join(sorted(task.environment)) or 'none'}",
        *(f"  command: {shlex.join(command)}" for command in _commands(launch)),
        "  each host makes its own plan; on this one: anyaccel run --dry-run without the options about hosts",
    ]
    print(styled(fitted("\n".join(lines), table_width(sys.stdout)), "plan", sys.stdout))


def _to_dict(launch: ClusterLaunch) -> dict[str, object]:
    task = launch.task
    return {
        "world_size": task.world_size,
        "launcher": launch.runner.name if launch.runner else None,
        "master_addr": task.options.master_addr,
        "master_port": task.options.master_port,
        "hosts": [
            {"name": host.name, "slots": list(host.slots), "first_rank": task.place(node).first_rank}
            for node, host in enumerate(task.hosts)
        ],
        "environment": dict(task.environment),
        "commands": [list(command) for command in _commands(launch)],
    }


def _commands(launch: ClusterLaunch) -> list[tuple[str, ...]]:
    if launch.runner is None or launch.commands:
        return list(launch.commands)
    return [launch.command("PORT/WORD/ADDRESS")[0]]


def run_or_show(options: LaunchOptions, cluster: ClusterOptions, *, dry_run: bool, as_json: bool) -> int:
    """Run the job, or with `dry_run` print it; returns the exit code."""
    if dry_run:
        show(options, cluster, as_json)
        return 0
    return run_cluster(options, cluster)
