# SPDX-License-Identifier: Apache-2.0
"""Communication among the ranks of a job: torch.distributed's names, plus shared memory inside one host."""

import anyaccel._needs_torch  # noqa: F401

# isort: split
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_gather_object,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_rank,
    get_world_size,
    irecv,
    is_available,
    is_initialized,
    isend,
    recv,
    reduce,
    reduce_scatter_tensor,
    scatter,
    send,
)

from anyaccel.comm.accelerate import support_accelerate
from anyaccel.comm.api import (
    abort,
    all_reduce_add_rms_norm,
    inference_all_reduce,
    inference_broadcast,
    monitored_barrier,
    symm_empty,
    symm_zeros,
)
from anyaccel.comm.backends import register as _register_backends
from anyaccel.comm.log import log_summary
from anyaccel.comm.start import get_local_rank, init_distributed, new_group

_register_backends()

__all__ = [
    "ReduceOp",
    "abort",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "inference_all_reduce",
    "inference_broadcast",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "support_accelerate",
    "symm_empty",
    "symm_zeros",
]
