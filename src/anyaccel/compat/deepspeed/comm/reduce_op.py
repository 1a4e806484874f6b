# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm.reduce_op: torch.distributed's, which DeepSpeed's stands for."""

from __future__ import annotations

from torch.distributed import ReduceOp

from .._cover import cover

__all__ = ["ReduceOp"]

cover(globals())
