# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm.constants: names of backends."""

from __future__ import annotations

from .._cover import cover

NCCL_BACKEND = "nccl"
CCL_BACKEND = "ccl"
MPI_BACKEND = "mpi"
GLOO_BACKEND = "gloo"
HCCL_BACKEND = "hccl"

cover(globals())
