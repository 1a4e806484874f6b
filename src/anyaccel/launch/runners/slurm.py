# SPDX-License-Identifier: Apache-2.0
"""Slurm's srun: starts every rank, in the present allocation or in one of its own.

srun returns the largest exit code, even that of a rank which it has ended itself. That does not matter, as agents
report to the launcher and then return 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.launch.counts import MOST_HOSTS
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.launch.plan.local_rank import slurm_tasks
from anyaccel.launch.runners import check_hosts, start_environment, unless_given


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of srun.

    --distribution=arbitrary, --nodelist=h1,h1,h2: rank N runs on the Nth host of the list. Otherwise srun sorts the
        hosts, and spreads ranks evenly.
    --cpu-bind=none: no binding, as our own plan binds ranks.
    --kill-on-bad-exit=1: an agent that cannot call back ends the others.
    --quit-on-interrupt: one Ctrl-C ends it, instead of two within a second.
    --export=ALL: the default, unless SLURM_EXPORT_ENV changes it.
    --input=none: workers on other hosts have no standard input.
    --chdir=/: if the folder is missing, Slurm would start the ranks in /tmp.
    """
    check_hosts(job, "Slurm")
    given = job.launcher_args
    placement = ("distribution", "m", "nodelist", "w")
    names = ",".join(host.name for host in job.hosts for _ in host.slots)
    return [
        "srun",
        f"--ntasks={job.world_size}",
        *unless_given(given, placement, "--distribution=arbitrary", f"--nodelist={names}"),
        *unless_given(given, ("cpu-bind",), "--cpu-bind=none"),
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        *unless_given(given, ("export",), "--export=ALL"),
        *unless_given(given, ("input", "i"), "--input=none"),
        *unless_given(given, ("chdir", "D"), "--chdir=/"),
        *(["--verbose"] if job.verbose else []),
        *given,
        *job.program,
    ]


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job, and what makes srun provide CPUs for its ranks.

    Outside of an allocation, srun allocates hosts. With an arbitrary distribution Slurm does not know how many CPUs it
    should allocate on each host: one with two ranks may get one CPU. On exclusive hosts each rank gets the CPUs that it
    asks for, which is one unless `--launcher_args=--cpus-per-task=N` asks for more. In `salloc --exclusive`, ranks may
    use all CPUs of their host.

    An allocation has one CPU per host unless more are asked for, even with several GPUs, and srun refuses more ranks
    than CPUs there: SLURM_OVERCOMMIT lets them share.
    """
    variables = start_environment(job)
    if "SLURM_JOB_ID" not in environ:
        if "SLURM_EXCLUSIVE" not in environ:
            variables["SLURM_EXCLUSIVE"] = "exclusive"
        return variables
    cpus = _cpus_of_hosts(environ)
    if cpus and max(len(host.slots) for host in job.hosts) > min(cpus):
        variables["SLURM_OVERCOMMIT"] = "1"
    return variables


def warnings(hosts: Sequence[Host], environ: Mapping[str, str]) -> list[str]:
    """A warning if ranks have to share CPUs in this allocation."""
    cpus = _cpus_of_hosts(environ) if "SLURM_JOB_ID" in environ else ()
    most = max(len(host.slots) for host in hosts)
    if not cpus or most <= max(cpus):
        return []
    shared = f"the {max(cpus)} CPU{'' if max(cpus) == 1 else 's'} that this allocation has there"
    return [
        f"{most} ranks of a host share {shared} (SLURM_JOB_CPUS_PER_NODE={environ['SLURM_JOB_CPUS_PER_NODE']}); "
        f"allocate with --ntasks-per-node={most} for a CPU each, --cpus-per-task=N for more, or --exclusive"
    ]


def _cpus_of_hosts(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The number of CPUs that the allocation has on each of its hosts; empty if Slurm does not tell it."""
    try:
        return slurm_tasks(environ.get("SLURM_JOB_CPUS_PER_NODE", ""), MOST_HOSTS)
    except ValueError:
        return ()
