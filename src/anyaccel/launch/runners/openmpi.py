# SPDX-License-Identifier: Apache-2.0
"""Open MPI's mpirun: starts every rank, through ssh or the daemons of a batch system."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import check_hosts, ssh_options, start_environment, unless_given


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of mpirun.

    --host, --map-by seq: rank N runs on the Nth host of the list. Otherwise the host that mpirun runs on comes first,
        wherever the hostfile has it.
    --bind-to none: no binding, as our own plan binds ranks.
    --allow-run-as-root: root is the only user in many containers; for other users it changes nothing.
    --mca plm_rsh_args: options for ssh.
    --wdir /: if the folder is missing, mpirun ends with an odd code; the worker has a better message.
    -x: variables that the start of Python depends on, by name only, so that their values need no quoting.

    When a rank fails, mpirun ends the others and returns the code of that rank; this is its default.
    """
    check_hosts(job, "Open MPI")
    given = job.launcher_args
    command = ["mpirun", "-np", str(job.world_size)]
    command += ["--host", ",".join(host.name for host in job.hosts for _ in host.slots)]
    command += unless_given(given, ("map-by", "rankfile", "rf"), "--map-by", "seq")
    command += unless_given(given, ("bind-to",), "--bind-to", "none")
    command.append("--allow-run-as-root")
    if "plm_rsh_args" not in given:
        command += ["--mca", "plm_rsh_args", " ".join(ssh_options(job))]
    command += unless_given(given, ("wdir", "wd"), "--wdir", "/")
    if job.verbose:
        command.append("--display-map")
    for name in start_environment(job):
        command += ["-x", name]
    return [*command, *given, *job.program]


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job: mpirun takes from its own environment what `-x` names."""
    return start_environment(job)
