# SPDX-License-Identifier: Apache-2.0
"""What the second backend does between hosts: reductions with the results of shared memory, and messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from anyaccel.comm.dtypes import AVG, BAND, BOR, BXOR, MAX, MIN, OP_NAMES, PRODUCT, SUM
from anyaccel.comm.python_group import divide_by

# What gloo adds up itself; the rest is gathered and reduced by torch.
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
OPS = tuple(ReduceOp.RedOpType(number) for number in range(len(OP_NAMES)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    # A tensor of one element is dense with any stride, which view() does not take.
    flat = tensor.as_strided((1,), (1,)) if tensor.numel() == 1 else tensor.reshape(-1)
    return flat.view(torch.uint8)


def widened(tensor: torch.Tensor, op: int) -> torch.Tensor:
    """Dense values, or where their sums would be rounded more than once, a wider copy to reduce in their place."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.float()
    if op == AVG and not tensor.dtype.is_floating_point:
        return _halves(tensor)
    return tensor


def narrowed(total: torch.Tensor, dtype: torch.dtype, op: int, count: int) -> torch.Tensor:
    """The reduction over `count` ranks of what `widened` gave, brought back to `dtype`; may overwrite `total`."""
    if op == AVG:
        if dtype.is_floating_point:
            divide_by(total, count)
        else:
            total = _mean_of_halves(total, count)
    return total.to(dtype)


def reduce_hosts(
    leaders: Any, hosts: int, tensor: torch.Tensor, op: int, finish: Callable[[Any], None]
) -> torch.Tensor:
    """The reduction over the hosts, which the group of their leaders is asked for; `finish` waits for a work of it."""
    adds_up = tensor.dtype in _GLOO_TYPES
    if adds_up and op in (MIN, MAX) and tensor.dtype.is_floating_point:
        # gloo's comparisons lose NaN.
        some = torch.full((1,), float(tensor.isnan().any()), device="cpu")
        finish(leaders.allreduce([some], dist.AllreduceOptions()))
        adds_up = not bool(some)
    if adds_up:
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(OPS[op])
        finish(leaders.allreduce([tensor], options))
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(hosts)]
    finish(leaders.allgather([[as_bytes(part) for part in parts]], [as_bytes(tensor)]))
    return reduce(_FUNCTIONS[op], parts)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """The upper and the lower 32 bits of integers, each as 64 bits: their sums over all ranks do not overflow."""
    wide = numbers.to(torch.int64)
    return torch.stack([wide >> 32, wide & 0xFFFFFFFF])


def _mean_of_halves(sums: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of integers, rounded towards zero, from the sums of their `_halves`."""
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
        """Wait for its end."""
        self._finish(self._work, timeout)

    def is_done(self) -> bool:
        """Whether it has ended."""
        return bool(self._work.is_completed())

    def source(self) -> int:
        """Who sent it."""
        return self._work._source_rank() if self._source is None else self._source
