# SPDX-License-Identifier: Apache-2.0
"""MVAPICH's mpiexec.hydra: every rank, through ssh. MVAPICH is an MPICH for fast networks, and so is its hydra."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import mpich

# Cores are given by our own plan. The library pins otherwise: the names are those of MVAPICH2, and of MVAPICH 3.
_UNBOUND = ("MV2_ENABLE_AFFINITY", "MVP_ENABLE_AFFINITY")


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of mpiexec.hydra: the options of `mpich.hydra_command`, and the library told not to bind."""
    options = []
    for name in _UNBOUND:
        if name not in job.launcher_args:
            options += ["-genv", name, "0"]
    return mpich.hydra_command(job, "MVAPICH", options)


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """As for MPICH."""
    return mpich.launcher_environment(job, environ)
