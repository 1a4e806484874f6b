# SPDX-License-Identifier: Apache-2.0
"""The backends `shm` and `ccl` of torch.distributed: what it makes their groups with."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from anyaccel.comm import hierarchy, shm


def create_shm(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """What `init_process_group("shm")` and `new_group(backend="shm")` give: shared memory inside a host.

    Where the ranks are on several hosts, which they tell each other through the store, it is the hierarchical group
    of comm/hierarchy.py.

    Raises:
        CommTimeoutError: a rank did not come; it is named.
        CommError: the ranks cannot share memory.
    """
    group, hosts, own_store = shm.try_local(store, rank, size, timeout)
    if group is not None:
        return group
    return hierarchy.create(own_store, rank, size, timeout, hosts)


def create_ccl(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """What `init_process_group("ccl")` and `new_group(backend="ccl")` give: oneCCL's collectives."""
    from anyaccel.comm import ccl_group

    made: dist.ProcessGroup = ccl_group.create(store, rank, size, timeout)
    return made


def register() -> None:
    """Tell torch.distributed of both backends; does nothing the second time."""
    if not dist.is_available():
        return
    for name, create in (("ccl", create_ccl), (shm.NAME, create_shm)):
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, create, devices=["cpu"])
