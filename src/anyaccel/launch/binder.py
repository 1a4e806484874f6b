# SPDX-License-Identifier: Apache-2.0
"""The binder without the launcher: one process below torchrun, mpirun or srun finds its place and takes it.

All processes of a machine make the same plan from the same facts, each takes its own part, and nobody talks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.launch.binding import RankShare, Shares, bind_ranks
from anyaccel.launch.local_rank import RankFromEnvironment
from anyaccel.launch.memory import memory_policy
from anyaccel.launch.options import BindingOptions
from anyaccel.launch.plan import RankBinding, check_strict, rank_environments
from anyaccel.launch.planning import allocator_path, nodes_of_devices
from anyaccel.topology import Machine, format_cpu_list

# How to keep each launcher from binding by itself.
_UNBIND = {
    "Open MPI": "mpirun --bind-to none",
    "MPICH or Intel MPI": "mpiexec -bind-to none, for Intel MPI I_MPI_PIN=off",
    "MVAPICH": "MVP_ENABLE_AFFINITY=0",
    "MVAPICH2": "MV2_ENABLE_AFFINITY=0",
    "PALS": "mpiexec --cpu-bind none",
    "Cray PMI": "aprun -cc none",
    "Slurm": "srun --cpu-bind=none",
    "jsrun": "jsrun --bind none",
    "Flux": "flux run -o cpu-affinity=off",
}


@dataclass(frozen=True)
class BinderPlan:
    """What every local rank gets, and what is to be said about it.

    Attributes:
        ranks: by local rank; what only the process itself knows (its rank among all) is in the entry of its own.
        notes: what is worth knowing, one line each.
        warnings: what was not done as asked, and what was done instead.
        spoken: notes that are said at the start: something that was set is replaced.
    """

    ranks: tuple[RankBinding, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    spoken: tuple[str, ...] = ()


def plan_rank(
    options: BindingOptions,
    machine: Machine,
    found: RankFromEnvironment,
    environ: Mapping[str, str],
    launchers_cpus: frozenset[int] | None = None,
) -> BinderPlan:
    """The plan that this process takes its part of.

    Args:
        found: the place of this process.
        environ: what the command inherits.
        launchers_cpus: logical CPUs of the launcher that started this process; None where that is not known.

    Raises:
        UsageError: it cannot be divided as asked; with strict options, anything that is a warning otherwise.
    """
    allocator = allocator_path(options, environ)
    environ, overridden = _without_torchruns_threads(environ, found)
    kept = _is_bound_already(machine, found, environ, launchers_cpus)
    if kept:
        shares = _keep(options, machine, found)
    else:
        shares = bind_ranks(options, machine, found.local_size, nodes_of_devices(options, machine, environ))
    variables, notes, warnings = rank_environments(options, machine, shares, environ, allocator)
    check_strict(options, warnings)
    spoken = []
    if overridden:
        threads = variables[found.local_rank]["OMP_NUM_THREADS"]
        spoken.append(f"OMP_NUM_THREADS=1, which torchrun sets by itself, becomes {threads}, the cores of the rank")
    own = found.rank if found.rank is not None else found.local_rank
    ranks = tuple(
        RankBinding(
            own - found.local_rank + local_rank,
            local_rank,
            machine.allowed_cpus if kept else share.cores,
            share.memory_policy,
            share.memory_nodes,
            {**_job(found, environ, local_rank), **env},
            strict=options.strict,
        )
        for local_rank, (share, env) in enumerate(zip(shares.ranks, variables, strict=True))
    )
    return BinderPlan(ranks, tuple(notes), tuple(warnings), tuple(spoken))


def cpus_of_launcher(variable: str) -> frozenset[int] | None:
    """CPUs of the process that gave `variable` to this process or its parents: a launcher does not bind itself."""
    pid = os.getppid()
    try:
        while pid:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if not any(entry.startswith(f"{variable}=".encode()) for entry in file.read().split(b"\0")):
                    break
            with open(f"/proc/{pid}/stat") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])
    except PermissionError:
        pass  # a daemon of root: that is the launcher
    except (OSError, ValueError, IndexError):
        return None
    try:
        return frozenset(os.sched_getaffinity(pid)) if pid else None
    except OSError:
        return None


def _without_torchruns_threads(
    environ: Mapping[str, str], found: RankFromEnvironment
) -> tuple[Mapping[str, str], bool]:
    """torchrun sets OMP_NUM_THREADS=1 for several workers where the user set nothing."""
    if "TORCHELASTIC_RUN_ID" not in environ or found.local_size < 2 or environ.get("OMP_NUM_THREADS") != "1":
        return environ, False
    return {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}, True


def _is_bound_already(
    machine: Machine, found: RankFromEnvironment, environ: Mapping[str, str], launchers_cpus: frozenset[int] | None
) -> bool:
    """Whether the launcher above gave this process other CPUs than its neighbours."""
    if found.source not in _UNBIND:
        return False
    if len(machine.cores()) < found.local_size:
        return found.local_size > 1
    if found.source == "Slurm":
        # Its cgroup confines all tasks of a step alike, which is no binding: only masks by task are.
        return environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map")) and "," in environ.get(
            "SLURM_CPU_BIND_LIST", ""
        )
    return launchers_cpus is not None and launchers_cpus > set(machine.allowed_cpus)


def _keep(options: BindingOptions, machine: Machine, found: RankFromEnvironment) -> Shares:
    """This process stays where it is; what the others have is not known."""
    cores = machine.allowed_cpus if options.smt else tuple(cpu.id for cpu in machine.cores())
    policy, nodes = memory_policy(machine, cores, options.memory_policy)
    share = RankShare(cores, policy, nodes)
    warning = (
        f"{found.source} has bound this process to CPU {format_cpu_list(machine.allowed_cpus)} already, which is kept; "
        f"to have anyaccel divide the machine among its {found.local_size} ranks: {_UNBIND[found.source]}"
    )
    return Shares((share,) * found.local_size, warnings=(warning,))


def _job(found: RankFromEnvironment, environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """What torch.distributed wants to know, where the launcher does not say it in those words."""
    wanted = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": found.local_size, "LOCAL_SIZE": found.local_size}
    if found.rank is not None and found.world_size is not None:
        wanted |= {"RANK": found.rank - found.local_rank + local_rank, "WORLD_SIZE": found.world_size}
    return {name: str(value) for name, value in wanted.items() if not environ.get(name)}


def given_by_hand(local_rank: int, local_size: int) -> RankFromEnvironment:
    """A place that the user says."""
    return RankFromEnvironment(None, None, local_rank, local_size, "--local_rank")
