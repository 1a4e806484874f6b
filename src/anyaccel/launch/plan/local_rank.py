# SPDX-License-Identifier: Apache-2.0
"""Reads the rank of this process from the variables of the launcher that has started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.launch.counts import MOST_IN_A_JOB, MOST_ON_A_HOST, parse_count, shorten
from anyaccel.launch.plan.ancestors import Ancestors


@dataclass(frozen=True)
class RankFromEnvironment:
    """The rank of this process.

    Attributes:
        rank: number among all processes; None if the launcher does not tell it.
        world_size: number of all processes; None if the launcher does not tell it.
        local_rank: number among the processes of this machine.
        local_size: number of processes of this machine.
        source: the name of the launcher, for messages.
        variable: the variable that has the local rank.
    """

    rank: int | None
    world_size: int | None
    local_rank: int
    local_size: int
    source: str
    variable: str = ""


@dataclass(frozen=True)
class _Source:
    """The variables of one launcher; of several for one value, the first that is set counts."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_sizes: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.rank, self.world_size, self.local_rank, *self.local_sizes)


_TORCH = _Source("torch.distributed", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
# From the innermost launcher outwards, where ancestors do not tell the nesting: torchrun is mostly started by srun or
# mpirun, and mpirun starts its daemons with srun.
_SOURCES = (
    _TORCH,
    _Source(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Source(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Source(
        "MVAPICH",
        "MVP_COMM_WORLD_RANK",
        "MVP_COMM_WORLD_SIZE",
        "MVP_COMM_WORLD_LOCAL_RANK",
        ("MVP_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Set by hydra, the process manager of both.
    _Source("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    _Source("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)),
    _Source("Cray PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",)),
    _Source(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    _Source("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _Source("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def rank_from_environment(
    environ: Mapping[str, str], *, launcher_only: bool = False, ancestors: Ancestors | None = None
) -> RankFromEnvironment:
    """The rank of this process, from the variables of torchrun, an MPI, Slurm, PALS, jsrun or Flux.

    If several launchers have set theirs, the innermost one counts, which has started this process.

    Args:
        ancestors: the ancestors, which show that; without them the order of `_SOURCES` decides.
        launcher_only: ignore RANK, LOCAL_RANK and so on, which may be inherited below an MPI launcher.

    Raises:
        UsageError: no launcher tells a rank, or an invalid one; names the variables that were looked for.
    """
    sources = [source for source in _SOURCES if not (launcher_only and source is _TORCH)]
    if ancestors is not None:
        # On another host an MPI, and Slurm, set inherited variables together with their own, so torch's come last.
        sources.sort(key=lambda source: (ancestors.generation(source.variables), source is _TORCH))
    incomplete: _Source | None = None
    for source in sources:
        if not environ.get(source.local_rank):
            continue
        local_size = _local_size(environ, source)
        if local_size is None:
            incomplete = incomplete or source
            continue
        local_rank = _number(environ, source.local_rank)
        if local_rank >= local_size:
            raise UsageError(
                f"{source.local_rank}={local_rank} is not below the number of local ranks, {local_size}, which "
                f"{source.name} gives; give --local_rank and --local_size"
            )
        rank, size = (
            _number(environ, name) if environ.get(name) else None for name in (source.rank, source.world_size)
        )
        return RankFromEnvironment(rank, size, local_rank, local_size, source.name, source.local_rank)
    if incomplete is not None:
        raise UsageError(
            f"{incomplete.local_rank}={environ[incomplete.local_rank]} is set, but not how many ranks this machine has "
            f"({' or '.join(_size_names(incomplete))}); give --local_size"
        )
    raise UsageError(
        "no local rank in the environment; looked for "
        + ", ".join(source.local_rank for source in sources)
        + "; give --local_rank and --local_size"
    )


# Variables that only torch's launchers set beside RANK: `anyaccel run` (and DeepSpeed's), and torchrun.
_TORCHS_OWN = ("CROSS_SIZE", "TORCHELASTIC_RUN_ID")


def is_claimed_twice(environ: Mapping[str, str]) -> bool:
    """Whether both torch's variables and those of another launcher are set, so that `launcher_below` has to decide."""
    return any(environ.get(name) for name in (_TORCH.rank, _TORCH.world_size)) and any(
        environ.get(source.rank) and environ.get(source.local_rank) for source in _SOURCES if source is not _TORCH
    )


def launcher_below(environ: Mapping[str, str], ancestors: Ancestors | None) -> RankFromEnvironment | None:
    """The rank from an MPI, Slurm, PALS, jsrun or Flux, if RANK and WORLD_SIZE are those of a launcher above it.

    Returns:
        None if RANK and WORLD_SIZE are this process's own (set by itself, by the innermost launcher or by a script), or
        if that cannot be known.

    Raises:
        UsageError: that launcher's variables are invalid.
    """
    names = (_TORCH.rank, _TORCH.world_size)
    if ancestors is None or not any(environ.get(name) for name in names) or ancestors.changed_here(names):
        return None
    own = ancestors.generation(names)
    # A daemon on another host sets forwarded variables together with its own, at the same generation. Variables that
    # only torch's launchers set then tell whether RANK comes from one of these or from a script in between.
    sent = any(name in environ and ancestors.generation((name,)) == own for name in _TORCHS_OWN)
    below = [
        source
        for source in _SOURCES
        if source is not _TORCH
        and environ.get(source.rank)
        and environ.get(source.local_rank)
        and ancestors.generation((source.rank, source.local_rank)) < own + sent
    ]
    if not below:
        return None
    try:
        return rank_from_environment(environ, launcher_only=True, ancestors=ancestors)
    except UsageError as error:
        raise UsageError(
            f"RANK={shorten(environ.get('RANK', ''))} was set by a launcher above {below[0].name}, which does not say "
            f"which rank this process is: {error}"
        ) from None


def slurm_tasks(text: str, nodes: int) -> tuple[int, ...]:
    """Tasks of the first `nodes` nodes of a text such as ``"2(x3),1"``, which is 2, 2, 2, 1.

    Raises:
        ValueError: it is no such text.
    """
    found: list[int] = []
    for part in text.split(","):
        tasks, bracket, rest = part.strip().partition("(x")
        count, times = parse_count(tasks), parse_count(rest.removesuffix(")")) if bracket else 1
        if count is None or count > MOST_ON_A_HOST or times is None or rest.endswith(")") != bool(bracket):
            raise ValueError(f"{shorten(part)} is not a number of tasks such as 2 or 2(x3)")
        found += [count] * min(times, nodes - len(found))
    return tuple(found)


def _local_size(environ: Mapping[str, str], source: _Source) -> int | None:
    for name in source.local_sizes:
        if environ.get(name):
            return _number(environ, name, MOST_ON_A_HOST)
    if source.name == "Slurm":
        return _slurm_local_size(environ)
    if source.name == "Flux" and environ.get("FLUX_JOB_SIZE") and environ.get("FLUX_JOB_NNODES"):
        # Flux does not tell the local size; the average is it if it is a whole number.
        tasks, nodes = _number(environ, "FLUX_JOB_SIZE"), _number(environ, "FLUX_JOB_NNODES")
        return tasks // nodes if nodes and tasks % nodes == 0 else None
    return None


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    # A step may have other numbers of tasks than its job.
    name = next(filter(environ.get, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")), None)
    if name is None or not environ.get("SLURM_NODEID"):
        return None
    node = _number(environ, "SLURM_NODEID", MOST_IN_A_JOB)
    try:
        return slurm_tasks(environ[name], node + 1)[node]
    except (ValueError, IndexError):
        raise UsageError(
            f"{name}={shorten(environ[name])} does not say how many tasks node {node} has; "
            "give --local_rank and --local_size"
        ) from None


def _size_names(source: _Source) -> tuple[str, ...]:
    others = {"Slurm": ("SLURM_TASKS_PER_NODE with SLURM_NODEID",), "Flux": ("as many on each node",)}
    return source.local_sizes or others[source.name]


def _number(environ: Mapping[str, str], name: str, most: int | None = None) -> int:
    text = environ[name].strip()
    number = parse_count(text)
    if number is not None and number <= (number if most is None else most):
        return number
    wrong = "is too large a number" if text.isascii() and text.isdecimal() else "is not a number"
    limit = f" (at most {most})" if most is not None else ""
    raise UsageError(f"{name}={shorten(environ[name])} {wrong}{limit}; give --local_rank and --local_size")
