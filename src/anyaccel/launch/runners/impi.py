# SPDX-License-Identifier: Apache-2.0
"""Intel MPI's mpiexec.hydra: starts every rank, through ssh. Its hydra has options of its own."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import ssh_options, start_environment, unless_given
from anyaccel.launch.runners.mpich import hydra_command


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of mpiexec.hydra: the options of `hydra_command`, and

    -bootstrap-exec-args: options for ssh.
    -genv I_MPI_PIN 0: no pinning, as our own plan binds ranks.
    """
    given = job.launcher_args
    options = [
        *unless_given(given, ("bootstrap-exec-args",), "-bootstrap-exec-args", " ".join(ssh_options(job))),
        *([] if "I_MPI_PIN" in given else ["-genv", "I_MPI_PIN", "0"]),
    ]
    return hydra_command(job, "Intel MPI", options)


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job: hydra itself reads I_MPI_*."""
    return start_environment(job)
