# SPDX-License-Identifier: Apache-2.0
"""MPICH's mpiexec (hydra): starts every rank, through ssh.

hydra, also Intel MPI's and MVAPICH's, goes on when a process fails that has not initialised MPI. Our launcher, which
the agents have called back, ends the job then.
"""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import check_hosts, ssh_options, start_environment, unless_given


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of mpiexec: the options of `hydra_command`, and

    -bind-to none: no binding, as our own plan binds ranks.
    """
    given = job.launcher_args
    return hydra_command(job, "MPICH", unless_given(given, ("bind-to", "binding"), "-bind-to", "none"))


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job, and hydra's options for ssh, for which MPICH's hydra has no option of its own."""
    options = [environ.get("HYDRA_LAUNCHER_EXTRA_ARGS", ""), *ssh_options(job)]
    return {
        **start_environment(job),
        "HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(filter(None, options)),
    }


def hydra_command(job: ClusterJob, title: str, options: list[str]) -> list[str]:
    """The argument vector of a hydra. hydra refuses options that are given twice, so the user's replace ours.

    -launcher ssh, -rmk user: use the hosts of the hostfile, also in an allocation of a batch system.
    -hosts h1:2,h2:1: ranks on each host, in this order; unlike with `-ppn` the numbers may differ.
    -genvlist, -genvnone: otherwise hydra forwards the launcher's whole environment, also DISPLAY and SSH_*.
    -wdir /: if the folder is missing, hydra fails without naming the host, or silently uses another folder.

    Args:
        options: options that differ from one hydra to another.
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
