# SPDX-License-Identifier: Apache-2.0
"""The module that `ShareMemCommBuilder().load()` returns: DeepSpeed's shared-memory op on our shared-memory groups.

`initialize(size, rank)` sets it up; `torch.ops.deepspeed.inference_all_reduce_(tensor)` sums a tensor over the ranks in
place, and `inference_all_reduce` gives the sum as a new one. Unlike DeepSpeed's it takes every dtype and layout, and
works also where the ranks are on several hosts, through torch.distributed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from anyaccel import env
from anyaccel.comm import api, shm
from anyaccel.comm.start import store_from_environment
from anyaccel.errors import UsageError

__all__ = ["initialize", "vector_kernel_level"]

_size = 0
# The group of ranks for which torch.distributed is not initialised.
_own_group: dist.ProcessGroup | None = None


def initialize(size: int, rank: int) -> None:
    """Set up sums over `size` ranks, of which this is `rank`; every rank calls it. The second call does nothing.

    The ranks are those of torch.distributed where that is initialised, else they meet at MASTER_ADDR and MASTER_PORT.

    Raises:
        UsageError: torch.distributed, or the launcher's variables, have other numbers.
        CommError: the ranks did not come together.
    """
    global _size, _own_group
    if _size:
        return
    if not 0 <= rank < size:
        raise UsageError(f"initialize(size={size}, rank={rank}): the rank must be from 0 to size - 1")
    if dist.is_initialized():
        _check_place(size, rank, dist.get_world_size(), dist.get_rank(), "torch.distributed")
    elif size > 1:
        timeout = timedelta(seconds=env.ANYACCEL_COMM_TIMEOUT.get())
        store, own_rank, own_size = store_from_environment(timeout)
        _check_place(size, rank, own_size, own_rank, "the environment")
        _own_group = shm.create_local(PrefixStore("anyaccel-shm-op", store), rank, size, timeout)
    _size = size


def vector_kernel_level() -> int:
    """Which dtypes DeepSpeed may sum with the op: 2 is all of them, which ours sums on every processor."""
    return 2


def _check_place(size: int, rank: int, own_size: int, own_rank: int, whose: str) -> None:
    if (size, rank) != (own_size, own_rank):
        raise UsageError(f"initialize(size={size}, rank={rank}): {whose} has rank {own_rank} of {own_size}")


def _all_reduce_in_place(tensor: torch.Tensor) -> torch.Tensor:
    if not _size:
        raise UsageError("torch.ops.deepspeed.inference_all_reduce_: call initialize(size, rank) of the op first")
    if _size > 1:
        api.inference_all_reduce(tensor, group=_own_group)
    return tensor


def _all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    return _all_reduce_in_place(tensor.clone())


def _define() -> object:
    from torch.library import Library

    library: Any = Library("deepspeed", "FRAGMENT")  # type: ignore[no-untyped-call]  # others have ops of this name too
    library.define("inference_all_reduce(Tensor self) -> Tensor")
    library.define("inference_all_reduce_(Tensor(a!) self) -> Tensor(a!)")
    library.impl("inference_all_reduce", _all_reduce, "CPU")
    library.impl("inference_all_reduce_", _all_reduce_in_place, "CPU")
    library.impl("inference_all_reduce", torch.empty_like, "Meta")
    library.impl("inference_all_reduce_", lambda tensor: tensor, "Meta")
    return library


_library = _define()  # the ops exist as long as this object
