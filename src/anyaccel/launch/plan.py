# SPDX-License-Identifier: Apache-2.0
"""The plan of a launch: which rank runs on which cores and memory, and with what environment.

`build_plan` is a pure function; `anyaccel.launch.make_plan` asks the machine for what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyaccel.launch.binding import divide_core_list, memory_policy, shared_cores, spread_cores
from anyaccel.launch.options import LaunchOptions
from anyaccel.topology import Machine, format_cpu_list


@dataclass(frozen=True)
class RankBinding:
    """One worker.

    Attributes:
        rank: number among all workers.
        local_rank: number among the workers of this machine.
        cores: logical CPUs it is bound to; empty when it is not bound.
        memory_policy: "bind" or "default".
        memory_nodes: NUMA nodes its memory comes from; empty with "default".
        env: what is set in its environment, on top of the launcher's own.
    """

    rank: int
    local_rank: int
    cores: tuple[int, ...]
    memory_policy: str
    memory_nodes: tuple[int, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class LaunchPlan:
    """All workers of one launch on this machine.

    Attributes:
        world_size: number of workers.
        master_addr: address of rank 0.
        master_port: TCP port of rank 0.
        ranks: one entry a worker, by rank.
        left_over: cores of the core list, else of the machine, that nobody got; empty when nobody is bound.
        notes: what the user should know about this plan, one line each.
    """

    world_size: int
    master_addr: str
    master_port: int
    ranks: tuple[RankBinding, ...]
    left_over: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def bound(self) -> bool:
        """Whether workers are bound to cores."""
        return bool(self.ranks[0].cores)

    def to_dict(self) -> dict[str, object]:
        """The plan in types that JSON has."""
        return {
            "world_size": self.world_size,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
            "bound": self.bound,
            "ranks": [
                {
                    "rank": binding.rank,
                    "local_rank": binding.local_rank,
                    "cores": list(binding.cores),
                    "memory": {"policy": binding.memory_policy, "nodes": list(binding.memory_nodes)},
                    "env": dict(binding.env),
                }
                for binding in self.ranks
            ],
            "left_over_cores": list(self.left_over),
            "notes": list(self.notes),
        }

    def render(self) -> str:
        """The plan for people, one line a rank, without a newline at the end."""
        workers = f"{self.world_size} worker{'' if self.world_size == 1 else 's'}"
        lines = [f"plan: {workers}, {self._cores_each()}, master {self.master_addr}:{self.master_port}"]
        width = len(str(self.world_size - 1))
        lines += [f"  rank {binding.rank:{width}}: {_place(binding)}" for binding in self.ranks]
        if self.bound:
            lines.append(f"  left-over cores: {format_cpu_list(self.left_over) or 'none'}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _cores_each(self) -> str:
        if not self.bound:
            return "not bound to cores"
        size = len(self.ranks[0].cores)
        return f"{size} core{'' if size == 1 else 's'} each"


def _place(binding: RankBinding) -> str:
    threads = f"OMP_NUM_THREADS={binding.env['OMP_NUM_THREADS']}"
    if not binding.cores:
        return f"any core, {threads}"
    cores = f"core{'' if len(binding.cores) == 1 else 's'} {format_cpu_list(binding.cores)}"
    if not binding.memory_nodes:
        return f"{cores}, memory of any node, {threads}"
    return f"{cores}, memory of node {format_cpu_list(binding.memory_nodes)}, {threads}"


def build_plan(
    options: LaunchOptions,
    machine: Machine,
    *,
    devices: int,
    master_port: int,
    environ: Mapping[str, str],
    extra_env: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """The plan for `options` on `machine`.

    Args:
        devices: number of workers when the options do not say.
        master_port: port of rank 0 when the options do not say.
        environ: the launcher's environment; what the user set there is kept.
        extra_env: more variables for every worker.

    Raises:
        UsageError: the cores cannot be divided as asked.
    """
    ranks = options.num_accelerators or devices
    notes: list[str] = []
    shares: Sequence[tuple[int, ...]] = [()] * ranks
    left_over: tuple[int, ...] = ()
    cores = len(machine.cores())
    if options.core_list is not None:
        shares, left_over = divide_core_list(machine, ranks, options.core_list)
        used = [core for share in shares for core in share]
        notes += [
            f"CPUs {format_cpu_list(group)} are threads of one physical core" for group in shared_cores(machine, used)
        ]
    elif options.bind_cores:
        shares, left_over = spread_cores(machine, ranks)
    elif ranks > cores:
        notes.append(f"{ranks} workers share {cores} core{'' if cores == 1 else 's'}")

    # An empty value counts as unset, as in OpenMP.
    users_threads = environ.get("OMP_NUM_THREADS") or (extra_env or {}).get("OMP_NUM_THREADS")
    if users_threads:
        notes.append(f"OMP_NUM_THREADS={users_threads} is kept as it was set")
    master_addr = options.master_addr or "127.0.0.1"
    port = options.master_port or master_port

    bindings = []
    for rank, share in enumerate(shares):
        policy, nodes = memory_policy(machine, share) if share else ("default", ())
        env = {
            **(extra_env or {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": users_threads or str(len(share) or max(1, cores // ranks)),
        }
        bindings.append(RankBinding(rank, rank, share, policy, nodes, env))
    return LaunchPlan(ranks, master_addr, port, tuple(bindings), left_over, tuple(notes))
