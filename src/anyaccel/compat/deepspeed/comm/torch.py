# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm.torch: the collectives as methods of an object."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from .._cover import cover
from . import comm

__all__ = ["TorchBackend"]

_METHODS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "destroy_process_group", "gather", "get_global_rank", "get_rank", "get_world_group",
    "get_world_size", "has_all_gather_into_tensor", "has_reduce_scatter_tensor", "inference_all_reduce", "irecv",
    "is_initialized", "isend", "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


class TorchBackend:
    """torch.distributed, started with these arguments if it has not been; its methods are those of deepspeed.comm."""

    def __init__(
        self,
        backend: str | None,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        comm.init_distributed(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
        self.name = name
        self.initialized = True
        self.using_mpi = self.get_backend() == "mpi"

    def get_backend(self, group: dist.ProcessGroup | None = None) -> str:
        """The name of the group's backend."""
        return dist.get_backend(group)


for _name in _METHODS:
    setattr(TorchBackend, _name, staticmethod(getattr(comm, _name)))

cover(globals())
