# SPDX-License-Identifier: Apache-2.0
"""MPICH's mpiexec (hydra): every rank, through ssh.

hydra goes on when a process fails that never spoke MPI, and so do Intel MPI's and MVAPICH's. Our agents hear of it from
the launcher that they have called back.
"""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import check_hosts, ssh_options, start_environment, unless_given


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of mpiexec: the options of `hydra_command`, and

    -bind-to none: cores are given by our own plan.
    """
    given = job.launcher_args
    return hydra_command(job, "MPICH", unless_given(given, ("bind-to", "binding"), "-bind-to", "none"))


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job, and what hydra tells ssh, for which MPICH's has no option."""
    options = [environ.get("HYDRA_LAUNCHER_EXTRA_ARGS", ""), *ssh_options(job)]
    return {
        **start_environment(job),
        "HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(filter(None, options)),
    }


def hydra_command(job: ClusterJob, title: str, options: list[str]) -> list[str]:
    """The argument vector of a hydra. Options that are given twice are an error of hydra's, so ours give way.

    -launcher ssh, -rmk user: hosts are those of the hostfile, also in an allocation of a batch system.
    -hosts h1:2,h2:1: ranks on each host, in this order; other than `-ppn` they may differ.
    -genvlist, -genvnone: otherwise the whole environment of the launcher travels, DISPLAY and SSH_* with it.
    -wdir /: where the folder is not there, hydra fails without naming the host, or stays elsewhere in silence.

    Args:
        options: what differs from one hydra to another.
    """
    check_hosts(job, title, users=True)
    given = job.launcher_args
    start = ",".join(start_environment(job))
    environment = ["-genvlist", start] if start else ["-genvnone"]
    return [
        "mpiexec.hydra",
        *unless_given(given, ("launcher", "bootstrap"), "-launcher", "ssh"),
        *unless_given(given, ("rmk",), "-rmk", "user"),
        *options,
        *unless_given(given, ("genvall", "genvnone", "genvlist"), *environment),
        *unless_given(given, ("wdir",), "-wdir", "/"),
        *(["-verbose"] if job.verbose else []),
        *given,
        "-hosts",
        ",".join(f"{host.name}:{len(host.slots)}" for host in job.hosts),
        "-n",
        str(job.world_size),
        *job.program,
    ]
