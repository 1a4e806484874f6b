# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm: collectives. Names are those of deepspeed.comm.comm."""

from __future__ import annotations

from torch.distributed import ReduceOp

from .._cover import cover
from .comm import *  # noqa: F403

__all__ = ["ReduceOp"]

cover(
    globals(),
    {"TorchBackend": ".comm.torch:TorchBackend"},
    ("comm", "constants", "reduce_op", "torch"),
)
