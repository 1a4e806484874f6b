# SPDX-License-Identifier: Apache-2.0
"""MVAPICH's mpiexec.hydra: starts every rank, through ssh. MVAPICH is derived from MPICH, with the same hydra."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import mpich

# They keep the library (MVAPICH2, MVAPICH 3) from pinning, as our own plan binds ranks.
_UNBOUND = ("MV2_ENABLE_AFFINITY", "MVP_ENABLE_AFFINITY")


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of mpiexec.hydra: the options of `mpich.hydra_command`, and the library told not to bind."""
    options = []
    for name in _UNBOUND:
        if name not in job.launcher_args:
            options += ["-genv", name, "0"]
    return mpich.hydra_command(job, "MVAPICH", options)


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The same variables as for MPICH."""
    return mpich.launcher_environment(job, environ)
