# SPDX-License-Identifier: Apache-2.0
"""Registers the backends `shm` and `ccl` with torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from anyaccel.comm import hierarchy, shm


def create_shm(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create the group of `init_process_group("shm")` and `new_group(backend="shm")`: shared memory inside a host.

    If the ranks are on several hosts, it is the hierarchical group of comm/hierarchy.py.

    Raises:
        CommTimeoutError: a rank did not come; it is named.
        CommError: the ranks cannot share memory.
    """
    group, hosts, own_store = shm.try_local(store, rank, size, timeout)
    if group is not None:
        return group
    return hierarchy.create(own_store, rank, size, timeout, hosts)


def create_ccl(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Create the group of `init_process_group("ccl")` and `new_group(backend="ccl")`: oneCCL's collectives."""
    from anyaccel.comm import ccl_group

    made: dist.ProcessGroup = ccl_group.create(store, rank, size, timeout)
    return made


TENSORS_IN = "cpu"  # memory: the device of the tensors that both take


def register() -> None:
    """Register both backends with torch.distributed; the second call does nothing."""
    if not dist.is_available():
        return
    for name, create in (("ccl", create_ccl), (shm.NAME, create_shm)):
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, create, devices=[TENSORS_IN])
