# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm: collectives. Names are those of deepspeed.comm.comm."""

from __future__ import annotations

from .._cover import cover
from .comm import *  # noqa: F403
from .reduce_op import ReduceOp

__all__ = ["ReduceOp"]

cover(globals(), packages=("comm", "constants", "reduce_op"))
