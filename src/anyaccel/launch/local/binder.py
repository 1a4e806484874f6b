# SPDX-License-Identifier: Apache-2.0
"""`anyaccel bind`: binds one process that torchrun, mpirun or srun has started.

All processes of a machine make the same plan from the same facts, and each takes its own part, without communication.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.launch.plan.ancestors import BOUND, RUN, Ancestors, openmp_of_outer, set_together
from anyaccel.launch.plan.binding import CoreShares, RankShare, bind_ranks
from anyaccel.launch.plan.local_rank import RankFromEnvironment
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.launch.plan.plan import RankBinding, check_strict, rank_environments
from anyaccel.launch.plan.planning import allocator_path, nodes_of_devices
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
_BY_HAND = "--local_rank"
# Launchers that set OMP_NUM_THREADS=1 if the user has not set it, by a variable that only they set.
_ONE_THREAD = {"TORCHELASTIC_RUN_ID": "torchrun", "RAY_JOB_ID": "Ray"}


@dataclass(frozen=True)
class BinderPlan:
    """The bindings of all local ranks, and messages about them.

    Attributes:
        ranks: by local rank; only the entry of this process is sure to have the right rank among all.
        notes: remarks, one line each.
        warnings: what was not done as asked, and what was done instead.
        announcements: notes that are printed at the start, as they are about a setting that is replaced.
    """

    ranks: tuple[RankBinding, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    announcements: tuple[str, ...] = ()


def plan_rank(
    options: BindingOptions,
    machine: Machine,
    found: RankFromEnvironment,
    environ: Mapping[str, str],
    launchers_cpus: frozenset[int] | None = None,
    ancestors: Ancestors | None = None,
) -> BinderPlan:
    """The plan for all processes of this machine, of which this process takes its own part.

    Args:
        found: the rank of this process.
        environ: the environment that the command inherits.
        launchers_cpus: logical CPUs of the launcher that started this process; None if unknown.
        ancestors: the ancestors, which show who has set a variable; None if unknown.

    Raises:
        UsageError: the cores cannot be divided as asked; with strict options, also whatever is a warning otherwise.
    """
    allocator = allocator_path(options, environ)
    environ, threads, setter = _without_launchers_threads(environ, found, ancestors)
    ours = _is_below_bind(found, environ, frozenset(machine.allowed_cpus), ancestors)
    kept = ours or _is_bound_already(machine, found, environ, launchers_cpus, ancestors)
    if kept:
        shares = _keep_binding(options, machine, found, ours=ours)
    else:
        shares = bind_ranks(options, machine, found.local_size, nodes_of_devices(options, machine, environ))
    variables, notes, warnings = rank_environments(options, machine, shares, environ, allocator)
    check_strict(options, warnings)
    announcements = []
    becomes = variables[found.local_rank]["OMP_NUM_THREADS"]
    if threads not in ("", becomes):
        announcements.append(
            f"OMP_NUM_THREADS={threads}, which {setter} sets by itself, becomes {becomes}, the cores of the rank"
        )
    own = found.rank if found.rank is not None else found.local_rank
    ranks = tuple(
        RankBinding(
            own - found.local_rank + local_rank,
            local_rank,
            machine.allowed_cpus if kept else share.cores,
            share.memory_policy,
            share.memory_nodes,
            {**_torch_variables(found, environ, local_rank, ancestors), **env},
            strict=options.strict,
        )
        for local_rank, (share, env) in enumerate(zip(shares.ranks, variables, strict=True))
    )
    return BinderPlan(ranks, tuple(notes), tuple(warnings), tuple(announcements))


def bound_mark(found: RankFromEnvironment, cpus: Iterable[int]) -> str:
    """The value of BOUND for a process of this rank that may use these CPUs."""
    return f"{found.local_rank}/{found.local_size}:{format_cpu_list(sorted(cpus))}"


def cpus_of_launcher(ancestors: Ancestors | None, variable: str) -> frozenset[int] | None:
    """CPUs of the launcher, which has set `variable` for its children and does not bind itself."""
    pid = ancestors.setter(variable) if ancestors is not None and variable else None
    try:
        return None if pid is None else frozenset(os.sched_getaffinity(pid))
    except OSError:
        return None


def _without_launchers_threads(
    environ: Mapping[str, str], found: RankFromEnvironment, ancestors: Ancestors | None
) -> tuple[Mapping[str, str], str, str]:
    """The environment without the OpenMP variables that a launcher, not the user, has set.

    Returns:
        That environment, the OMP_NUM_THREADS that was removed, and the launcher that had set it ("" and "" for none).
    """
    threads, setter, gone = environ.get("OMP_NUM_THREADS", ""), "", set()
    for variable, name in _ONE_THREAD.items():
        # torchrun does so for several workers only; without ancestors, this is all that is known.
        may = variable in environ and threads == "1" and (ancestors is not None or found.local_size > 1)
        # In a worker of Ray, the job's variables are set by an older process than those of the training.
        beside = variable if name == "torchrun" else "LOCAL_RANK"
        if may and set_together(ancestors, "OMP_NUM_THREADS", beside):
            setter, gone = name, {"OMP_NUM_THREADS"}
    outer = openmp_of_outer(environ, ancestors)
    setter = outer.get("OMP_NUM_THREADS", setter)
    gone |= outer.keys()
    left = {name: value for name, value in environ.items() if name not in gone}
    return left, threads if "OMP_NUM_THREADS" in gone else "", setter


def _is_bound_already(
    machine: Machine,
    found: RankFromEnvironment,
    environ: Mapping[str, str],
    launchers_cpus: frozenset[int] | None,
    ancestors: Ancestors | None,
) -> bool:
    """Whether the launcher has bound this process to CPUs of its own."""
    narrower = launchers_cpus is not None and launchers_cpus > set(machine.allowed_cpus)
    if found.source not in _UNBIND:
        return narrower and _is_below_run(found, environ, ancestors)
    if found.source == "Slurm":
        # Slurm's cgroup confines all tasks of a step alike; only masks by task bind them.
        return environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map")) and "," in environ.get(
            "SLURM_CPU_BIND_LIST", ""
        )
    if launchers_cpus is None:
        # This process has fewer cores than there are ranks, and than the machine has: they have been divided already.
        return len(machine.cores()) < found.local_size and len(machine.allowed_cpus) < len(machine.cpus)
    cores = len({cpu.core for cpu in machine.cpus if cpu.id in launchers_cpus})
    if narrower and cores < found.local_size:
        raise UsageError(
            f"{found.local_size} ranks cannot each have a core of their own: {found.source} has only "
            f"{cores} core{'' if cores == 1 else 's'} here (CPU {format_cpu_list(sorted(launchers_cpus))}); "
            f"start at most {cores}, or do not bind them"
        )
    return narrower


def _is_below_run(found: RankFromEnvironment, environ: Mapping[str, str], ancestors: Ancestors | None) -> bool:
    """Whether `anyaccel run` itself has started this process, not a torchrun below it."""
    return found.source != _BY_HAND and RUN in environ and set_together(ancestors, RUN, found.variable)


def _is_below_bind(
    found: RankFromEnvironment, environ: Mapping[str, str], cpus: frozenset[int], ancestors: Ancestors | None
) -> bool:
    """Whether `anyaccel bind` has bound this process for the same rank, with no other launcher in between."""
    mark = environ.get(BOUND)
    if found.source == _BY_HAND or mark != bound_mark(found, cpus):
        return False
    return ancestors is None or ancestors.generation((BOUND,)) <= ancestors.generation((found.variable,))


def _keep_binding(options: BindingOptions, machine: Machine, found: RankFromEnvironment, *, ours: bool) -> CoreShares:
    """Shares that keep the present binding of this process; those of the other ranks are unknown.

    Args:
        ours: whether `anyaccel bind` has bound it.
    """
    cores = machine.allowed_cpus if options.smt else tuple(cpu.id for cpu in machine.cores())
    policy, nodes = memory_policy(machine, cores, options.memory_policy)
    share = RankShare(cores, policy, nodes)
    if ours or found.source not in _UNBIND:  # `anyaccel run` or `bind` has done all of it
        return CoreShares((share,) * found.local_size)
    warning = (
        f"{found.source} has bound this process to CPU {format_cpu_list(machine.allowed_cpus)} already, which is kept; "
        f"to have anyaccel divide the machine among its {found.local_size} ranks: {_UNBIND[found.source]}"
    )
    return CoreShares((share,) * found.local_size, warnings=(warning,))


def _torch_variables(
    found: RankFromEnvironment, environ: Mapping[str, str], local_rank: int, ancestors: Ancestors | None
) -> dict[str, str]:
    """torch.distributed's variables, where they are missing or were set for another process by an outer launcher."""
    wanted = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": found.local_size, "LOCAL_SIZE": found.local_size}
    if found.rank is not None and found.world_size is not None:
        wanted |= {"RANK": found.rank - found.local_rank + local_rank, "WORLD_SIZE": found.world_size}
    return {
        name: str(value)
        for name, value in wanted.items()
        if not environ.get(name) or _belongs_to_another(name, found, ancestors)
    }


def _belongs_to_another(name: str, found: RankFromEnvironment, ancestors: Ancestors | None) -> bool:
    if found.source == _BY_HAND:
        return True
    if found.source not in _UNBIND or ancestors is None:
        return False
    return ancestors.generation((name,)) >= ancestors.generation((found.variable,))


def given_by_hand(local_rank: int, local_size: int) -> RankFromEnvironment:
    """A rank that the user has given as an option."""
    return RankFromEnvironment(None, None, local_rank, local_size, _BY_HAND)
