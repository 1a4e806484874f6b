# SPDX-License-Identifier: Apache-2.0
"""Reductions and messages between hosts over a second backend, with the same results as through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from anyaccel.comm.dtypes import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
from anyaccel.comm.process_group import divide_by
from anyaccel.comm.tensors import as_bytes

# The dtypes that gloo reduces itself; other tensors are gathered, and reduced by torch.
_GLOO_TYPES = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_FUNCTIONS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def widen(tensor: torch.Tensor, op: int) -> torch.Tensor:
    """The tensor, or a copy in a wider dtype where its sums would otherwise be rounded more than once."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    if op == AVG and not tensor.dtype.is_floating_point:
        return _split_in_halves(tensor)
    return tensor


def narrow(total: torch.Tensor, dtype: torch.dtype, op: int, count: int) -> torch.Tensor:
    """Convert the reduction over `count` ranks of `widen`'s result back to `dtype`; may overwrite `total`."""
    if op == AVG:
        if dtype.is_floating_point:
            divide_by(total, count)
        else:
            total = _mean_of_halves(total, count)
    return total.to(dtype)


def reduce_hosts(
    leaders: Any, hosts: int, tensor: torch.Tensor, op: int, finish: Callable[[Any], None]
) -> torch.Tensor:
    """Reduce over the hosts through the group of their leader ranks; `finish` waits for a work of that group."""
    gloo_reduces = tensor.dtype in _GLOO_TYPES
    if gloo_reduces and op in (MIN, MAX) and tensor.dtype.is_floating_point:
        # gloo's comparisons lose NaN.
        any_nan = torch.full((1,), float(tensor.isnan().any()), device="cpu")
        finish(leaders.allreduce([any_nan], dist.AllreduceOptions()))
        gloo_reduces = not bool(any_nan)
    if gloo_reduces:
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.RedOpType(op))
        finish(leaders.allreduce([tensor], options))
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(hosts)]
    finish(leaders.allgather([[as_bytes(part) for part in parts]], [as_bytes(tensor)]))
    return reduce(_FUNCTIONS[op], parts)


def _split_in_halves(numbers: torch.Tensor) -> torch.Tensor:
    """The upper and the lower 32 bits of integers, each as 64 bits: their sums over all ranks do not overflow."""
    wide = numbers.to(torch.int64)
    return torch.stack([wide >> 32, wide & 0xFFFFFFFF])


def _mean_of_halves(sums: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of integers, rounded towards zero, from the sums of their `_split_in_halves`."""
    upper = sums[0].div(count, rounding_mode="floor")
    rest = ((sums[0] - upper * count) << 32) + sums[1]
    lower_part = rest.div(count, rounding_mode="floor")
    remains = rest - lower_part * count
    mean = (upper << 32) + lower_part
    return mean + ((mean < 0) & (remains > 0)).to(torch.int64)


class HostMessage:
    """A message of the second backend."""

    def __init__(self, work: Any, source: int | None, finish: Callable[[Any, timedelta | None], None]) -> None:
        """`source`: None where it may come from any rank; `finish` waits for the work."""
        self._work, self._source, self._finish = work, source, finish

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the message is complete."""
        self._finish(self._work, timeout)

    def is_done(self) -> bool:
        """Whether the message is complete."""
        return bool(self._work.is_completed())

    def source(self) -> int:
        """The rank that sent it."""
        return self._work._source_rank() if self._source is None else self._source
