# SPDX-License-Identifier: Apache-2.0
"""deepspeed.launcher.constants: names of launchers."""

from __future__ import annotations

from .._cover import cover

PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"

cover(globals())
