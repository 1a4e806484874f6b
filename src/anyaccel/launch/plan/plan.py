# SPDX-License-Identifier: Apache-2.0
"""The plan of a launch: which rank runs on which cores and memory, and with what environment.

`build_plan` is a pure function; `anyaccel.launch.make_plan` asks the machine for what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.launch.counts import parse_count
from anyaccel.launch.plan.binding import CoreShares, RankShare, bind_ranks
from anyaccel.launch.plan.devices import narrow_devices
from anyaccel.launch.plan.numeric import openmp_binding
from anyaccel.launch.plan.options import BindingOptions, LaunchOptions
from anyaccel.topology import Machine, format_cpu_list
from anyaccel.topology.model import counted


@dataclass(frozen=True)
class RankBinding:
    """One worker.

    Attributes:
        rank: number among all workers.
        local_rank: number among the workers of this machine.
        cores: logical CPUs it is bound to; empty when it is not bound.
        memory_policy: a key of `memory.MEMORY_MODES`.
        memory_nodes: NUMA nodes of that policy; empty with "default".
        env: what is set in its environment, on top of the launcher's own.
        strict: end it where the kernel refuses to bind it.
    """

    rank: int
    local_rank: int
    cores: tuple[int, ...]
    memory_policy: str
    memory_nodes: tuple[int, ...]
    env: Mapping[str, str]
    strict: bool = False


@dataclass(frozen=True)
class HostPlace:
    """The position of this machine's ranks in the whole job.

    Attributes:
        first_rank: rank of the first worker of this machine.
        world_size: number of workers of the whole job; None if all are on this machine.
        node: number of this machine.
        nodes: number of machines.
        ahead, behind: number of workers under other names of this machine, before and after these; cores are divided
            among all of them.
        devices: numbers of the visible devices that are used, one per worker; None for the first ones.
        all_devices: the devices of the workers under all names of this machine; None if it has no other name.
    """

    first_rank: int = 0
    world_size: int | None = None
    node: int = 0
    nodes: int = 1
    ahead: int = 0
    behind: int = 0
    devices: tuple[int, ...] | None = None
    all_devices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Equipment:
    """The devices and the allocator of this machine.

    Attributes:
        devices: number of devices, which is the default number of workers.
        device_nodes: NUMA node of the device of each worker, None if unknown; empty without devices.
        device_variable: the visible-devices variable, "" for none. Each worker sees all devices that are used, and
            takes the one of its LOCAL_RANK.
        allocator: path of the library to preload; "" for none.
    """

    devices: int = 1
    device_nodes: tuple[int | None, ...] = ()
    device_variable: str = ""
    allocator: str = ""


@dataclass(frozen=True)
class LaunchPlan:
    """All workers of one launch on this machine.

    Attributes:
        world_size: number of workers of the whole job.
        master_addr: address of rank 0.
        master_port: TCP port of rank 0.
        ranks: one entry for each worker of this machine, by rank.
        left_over: cores of the core list, or of the machine, that no worker has; empty if workers are not bound.
        notes: remarks about this plan, one line each.
        warnings: what was not done as asked, and what was done instead; printed at the start.
        reserved: cores that are left to the system.
    """

    world_size: int
    master_addr: str
    master_port: int
    ranks: tuple[RankBinding, ...]
    left_over: tuple[int, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    reserved: tuple[int, ...] = ()

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
            "reserved_cores": list(self.reserved),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def render(self) -> str:
        """The plan for people, one line a rank, without a newline at the end."""
        here, all_of_them = len(self.ranks), self.world_size
        workers = f"{all_of_them} worker{'' if all_of_them == 1 else 's'}"
        if here != all_of_them:
            workers = f"{here} of {workers} here"
        lines = [f"plan: {workers}, {self._cores_each()}, master {self.master_addr}:{self.master_port}"]
        width = len(str(self.ranks[-1].rank))
        lines += [f"  rank {binding.rank:{width}}: {describe(binding)}" for binding in self.ranks]
        if self.reserved:
            lines.append(f"  reserved cores: {format_cpu_list(self.reserved)}")
        if self.bound:
            lines.append(f"  left-over cores: {format_cpu_list(self.left_over) or 'none'}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _cores_each(self) -> str:
        if not self.bound:
            return "not bound to cores"
        sizes = {len(binding.cores) for binding in self.ranks}
        each = str(max(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
        return f"{each} core{'' if each == '1' else 's'} each"


_MEMORY = {
    "bind": "memory of node",
    "preferred": "memory first of node",
    "interleave": "memory in turn of node",
}


def describe(binding: RankBinding) -> str:
    """Where one rank runs, for people."""
    threads = f"OMP_NUM_THREADS={binding.env['OMP_NUM_THREADS']}"
    cores = f"core{'' if len(binding.cores) == 1 else 's'} {format_cpu_list(binding.cores)}"
    memory = f"{_MEMORY.get(binding.memory_policy, '')} {format_cpu_list(binding.memory_nodes)}"
    if not binding.memory_nodes:
        memory = "memory of any node" if binding.cores else ""
    return ", ".join(filter(None, (cores if binding.cores else "any core", memory, threads)))


def build_plan(
    options: LaunchOptions,
    machine: Machine,
    equipment: Equipment,
    *,
    master_port: int,
    environ: Mapping[str, str],
    extra_env: Mapping[str, str] | None = None,
    place: HostPlace = HostPlace(),
) -> LaunchPlan:
    """The plan for `options` on `machine`, which has `equipment`.

    Args:
        master_port: port of rank 0 when the options do not say.
        environ: the launcher's environment; what the user set there is kept.
        extra_env: more variables for every worker.
        place: where the workers of this machine stand in the whole job.

    Raises:
        UsageError: the cores cannot be divided as asked; with strict options, anything that is a warning otherwise.
    """
    chosen, variable = place.devices, equipment.device_variable
    ranks = options.num_accelerators or (equipment.devices if chosen is None else len(chosen))
    inherited = {**environ, **(extra_env or {})}
    shares = bind_ranks(options, machine, place.ahead + ranks + place.behind, equipment.device_nodes)
    variables, notes, warnings = rank_environments(options, machine, shares, inherited, equipment.allocator)
    own = slice(place.ahead, place.ahead + ranks)
    variables = variables[own]
    if chosen is not None and variable:
        visible = narrow_devices(variable, inherited, chosen)
        variables = [{**env, variable: visible} for env in variables]
        if inherited.get(variable, visible) != visible:
            notes.append(f"{variable}={inherited[variable]} becomes {visible} for the slots chosen")
    check_strict(options, warnings)

    world_size = ranks if place.world_size is None else place.world_size
    master_addr = options.master_addr or "127.0.0.1"
    port = options.master_port or master_port
    bindings = []
    for local_rank, share in enumerate(shares.ranks[own]):
        rank = place.first_rank + local_rank
        env = {
            **(extra_env or {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "CROSS_RANK": str(place.node),
            "CROSS_SIZE": str(place.nodes),
            "GROUP_RANK": str(place.node),
            "NODE_RANK": str(place.node),
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(port),
            **variables[local_rank],
        }
        bindings.append(
            RankBinding(
                rank, local_rank, share.cores, share.memory_policy, share.memory_nodes, env, strict=options.strict
            )
        )
    return LaunchPlan(
        world_size,
        master_addr,
        port,
        tuple(bindings),
        shares.left_over,
        tuple(notes),
        tuple(warnings),
        shares.reserved,
    )


def rank_environments(
    options: BindingOptions, machine: Machine, shares: CoreShares, environ: Mapping[str, str], allocator: str
) -> tuple[list[dict[str, str]], list[str], list[str]]:
    """The variables for numeric libraries and the allocator, by rank, with all notes and warnings of these shares.

    Args:
        environ: the environment that the ranks inherit.
        allocator: path of the library to preload; "" for none.
    """
    ranks = len(shares.ranks)
    cores = len(machine.cores())
    notes, warnings = list(shares.notes), list(shares.warnings)
    if not options.bind_cores and ranks > cores:
        notes.append(f"{ranks} workers share {cores} core{'' if cores == 1 else 's'}")
    # An empty value counts as unset, as in OpenMP.
    users_threads = environ.get("OMP_NUM_THREADS", "")
    if users_threads:
        least = min(len(share.cores) for share in shares.ranks)
        first = users_threads.partition(",")[0].strip()
        threads = parse_count(first)
        too_many = first.isdecimal() if threads is None else threads > least
        if options.bind_cores and too_many:
            warnings.append(
                f"OMP_NUM_THREADS={users_threads} is kept as it was set, though a worker has only {least} "
                f"CPU{'' if least == 1 else 's'}"
            )
        else:
            notes.append(f"OMP_NUM_THREADS={users_threads} is kept as it was set")
    variables: list[dict[str, str]] = [{} for _ in shares.ranks]
    if options.bind_cores:
        variables, kept, replaced = openmp_binding([share.cores for share in shares.ranks], environ)
        notes += kept
        warnings += replaced
    isolated = _isolated(machine, shares.ranks)
    if isolated and environ.get("OMP_PROC_BIND", "false").strip().lower() in ("", "false"):
        warnings.append(
            f"CPUs {format_cpu_list(isolated)} are isolated (isolcpus): the threads of a worker all stay on the CPU "
            "where they start; give each worker one such CPU, or set OMP_PROC_BIND=close, which spreads OpenMP's"
        )
    threads_of = [len(share.cores) or max(1, cores // ranks) for share in shares.ranks]
    if machine.cpu_quota is not None and machine.cpu_quota < sum(threads_of) and not users_threads:
        most = max(1, int(machine.cpu_quota / ranks))
        threads_of = [min(threads, most) for threads in threads_of]
        warnings.append(
            f"a cgroup leaves this job {machine.cpu_quota:g} CPUs' time (cpu.max) of {counted(cores, 'core')}: "
            f"a worker gets {counted(most, 'thread')} at most; raise that limit, or set OMP_NUM_THREADS"
        )
    for env, threads in zip(variables, threads_of, strict=True):
        env["OMP_NUM_THREADS"] = users_threads or str(threads)
    if allocator:
        from anyaccel.launch.plan.allocators import preload  # few launches need it

        variables = [{**env, "LD_PRELOAD": preload(allocator, environ)} for env in variables]
        if environ.get("LD_PRELOAD"):
            notes.append(f"LD_PRELOAD={environ['LD_PRELOAD']} comes after {allocator}")
    return variables, notes, warnings


def _isolated(machine: Machine, shares: Sequence[RankShare]) -> list[int]:
    """The isolated CPUs of workers that have several CPUs."""
    several = [cpus for share in shares if len(cpus := share.cores or machine.allowed_cpus) > 1]
    return sorted({cpu for cpus in several for cpu in cpus}.intersection(machine.isolated_cpus))


def check_strict(options: BindingOptions, warnings: Sequence[str]) -> None:
    """Raise UsageError if there are warnings and options are strict."""
    if options.strict and warnings:
        raise UsageError(f"{'; '.join(warnings)}; that is an error because of --strict")
