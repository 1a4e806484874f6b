# SPDX-License-Identifier: Apache-2.0
"""deepspeed.comm.comm: collectives under DeepSpeed's names, on those of anyaccel.comm and torch.distributed.

`prof`, `log_name` and `debug` are accepted: here `anyaccel.comm` measures all calls or none.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, is_available, is_initialized
from torch.distributed.device_mesh import init_device_mesh

from anyaccel import comm
from anyaccel.comm import log
from anyaccel.comm.start import place_variables, take_place_of_inner_launcher
from anyaccel.comm.work import JoinedWork
from anyaccel.errors import UsageError
from anyaccel.launch.plan.ancestors import read_ancestors
from anyaccel.launch.plan.local_rank import rank_from_environment

from .._cover import cover
from ..constants import TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = [
    "P2POp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]  # fmt: skip

Group = dist.ProcessGroup | None
_SUM = ReduceOp.SUM


# Start and groups -----------------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Mapping[str, Any] | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed for this job, as `anyaccel.init_distributed`.

    Args:
        auto_mpi_discovery: below mpirun or srun, take the place of this process from their variables.
        distributed_port: port of rank 0 in that case.
        verbose: accepted.
        dist_init_required: False leaves the start to the caller, who must have made it.
        config: `comms_logger` of it configures what `log_summary` shows.
    """
    if config is not None:
        configure(deepspeed_config=config)
    if dist_init_required is False and not dist.is_initialized():
        raise UsageError("init_distributed(dist_init_required=False): torch.distributed has not been started")
    if dist_init_required is False or dist.is_initialized():
        return
    if auto_mpi_discovery and rank < 0 and init_method is None:
        mpi_discovery(distributed_port, verbose)
    comm.init_distributed(dist_backend, timeout, init_method, rank, world_size)


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the variables of mpirun or srun, if any.

    A RANK that is there stays, unless it is of a launcher above the one that has started this process.

    Raises:
        UsageError: ranks are on several hosts and MASTER_ADDR is not set.
    """
    if "RANK" in os.environ:
        take_place_of_inner_launcher()
        return
    try:
        found = rank_from_environment(os.environ, launcher_only=True, ancestors=read_ancestors(os.environ))
    except UsageError:
        return  # no launcher: a job of this one process
    if found.rank is None or found.world_size is None:
        return
    if found.world_size > found.local_size and not os.environ.get("MASTER_ADDR"):
        raise UsageError(
            f"{found.source} started {found.world_size} ranks on several hosts, and MASTER_ADDR is not set: start the "
            "job with `deepspeed` or `anyaccel run`, or export the address of rank 0"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    os.environ.update(place_variables(found))


def destroy_process_group(group: Group = None) -> None:
    """As torch.distributed's."""
    dist.destroy_process_group(group)


def new_group(ranks: list[int]) -> Any:
    """As `anyaccel.comm.new_group`."""
    return comm.new_group(ranks)


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_rank(group: Group = None) -> int:
    """This process in the group."""
    return dist.get_rank(group)


def get_world_size(group: Group = None) -> int:
    """Ranks of the group."""
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """This worker on its host."""
    return comm.get_local_rank()


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """The rank in the job of a rank of the group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """The ranks in the job of all ranks of the group."""
    return list(dist.get_process_group_ranks(group))


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """torch.distributed.init_device_mesh on the accelerator."""
    from anyaccel.accelerator import get_accelerator

    return init_device_mesh(get_accelerator().device_name(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


# Measuring ------------------------------------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Switch the log of collectives on or off; `log_summary` prints it.

    Args:
        deepspeed_config: a configuration, whose `comms_logger` has `enabled`.
        prof_all, prof_ops, verbose, debug: accepted; all operations are logged, or none.
    """
    section = deepspeed_config.get("comms_logger", {}) if isinstance(deepspeed_config, Mapping) else {}
    wanted = section.get("enabled") if enabled is None else enabled
    if wanted is not None:
        log.configure(enabled=bool(wanted))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """As `anyaccel.comm.log_summary`: what was logged on all ranks, which all must call it."""
    return log.log_summary(show_straggler=show_straggler, return_dict=return_dict)


def reset_log() -> None:
    """Forget what was logged."""
    log.reset()


def has_comm_data() -> bool:
    """Whether anything was logged."""
    return bool(log.entries())


def get_comm_operation_count() -> int:
    """Operations that were logged."""
    return sum(entry.count for entry in log.entries())


def get_logged_comm_ops() -> list[str]:
    """Names of the operations that were logged."""
    return sorted({entry.op for entry in log.entries()})


# Collectives ----------------------------------------------------------------------------------------------

_IGNORED = ("prof", "log_name", "debug")


def _as_in_torch(name: str, arguments: str, ignored: tuple[str, ...] = _IGNORED) -> Any:
    """torch.distributed's function of a name with DeepSpeed's arguments.

    Args:
        arguments: DeepSpeed's names of the arguments that torch has too, in torch's order.
        ignored: the arguments behind those, which change nothing.
    """
    theirs = list(inspect.signature(getattr(dist, name)).parameters.values())
    own = [kept.replace(name=given) for kept, given in zip(theirs, arguments.split(), strict=False)]
    renamed = {given.name: kept.name for kept, given in zip(theirs, own, strict=False) if given.name != kept.name}
    known = len(own)

    def call(*values: Any, **options: Any) -> Any:
        for option in ignored:
            options.pop(option, None)
        for given in renamed.keys() & options.keys():
            options[renamed[given]] = options.pop(given)
        return getattr(dist, name)(*values[:known], **options)

    extra = [inspect.Parameter(option, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for option in ignored]
    call.__signature__ = inspect.Signature([*own, *extra])  # type: ignore[attr-defined]
    call.__doc__ = "As torch.distributed's."
    call.__name__ = call.__qualname__ = name
    return call


broadcast = _as_in_torch("broadcast", "tensor src group async_op")
broadcast_object_list = _as_in_torch("broadcast_object_list", "object_list src group device")
all_reduce = _as_in_torch("all_reduce", "tensor op group async_op")
all_reduce_coalesced = _as_in_torch("all_reduce_coalesced", "tensors op group async_op")
reduce = _as_in_torch("reduce", "tensor dst op group async_op")
reduce_scatter = _as_in_torch("reduce_scatter", "output input_list op group async_op")
reduce_scatter_tensor = _as_in_torch("reduce_scatter_tensor", "output_tensor tensor op group async_op")
reduce_scatter_fn = _as_in_torch(
    "reduce_scatter_tensor", "output_tensor tensor op group async_op", ignored=("prof", "debug")
)
all_gather = _as_in_torch("all_gather", "tensor_list tensor group async_op")
all_gather_into_tensor = _as_in_torch("all_gather_into_tensor", "output_tensor tensor group async_op")
allgather_fn = _as_in_torch("all_gather_into_tensor", "output_tensor input_tensor group async_op", ignored=("debug",))
all_gather_object = _as_in_torch("all_gather_object", "object_list obj group")
all_to_all_single = _as_in_torch(
    "all_to_all_single", "output tensor output_split_sizes input_split_sizes group async_op"
)
all_to_all = _as_in_torch("all_to_all", "output_tensor_list input_tensor_list group async_op")
gather = _as_in_torch("gather", "tensor gather_list dst group async_op")
scatter = _as_in_torch("scatter", "tensor scatter_list src group async_op")
barrier = _as_in_torch("barrier", "group async_op device_ids")
send = _as_in_torch("send", "tensor dst group tag")
recv = _as_in_torch("recv", "tensor src group tag")
isend = _as_in_torch("isend", "tensor dst group tag")
irecv = _as_in_torch("irecv", "tensor src group tag")
batch_isend_irecv = _as_in_torch("batch_isend_irecv", "p2p_op_list")


def inference_all_reduce(
    tensor: Tensor, op: Any = _SUM, group: Group = None, async_op: bool = False,
    prof: bool = False, log_name: str = "inference_all_reduce", debug: Any = None,
) -> Any:  # fmt: skip
    """As `anyaccel.comm.inference_all_reduce`; it is done when it returns, so `async_op` changes nothing."""
    return comm.inference_all_reduce(tensor, op=op, group=group)


def all_gather_coalesced(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: Group = None, async_op: bool = False
) -> Any:
    """all_gather_into_tensor for each pair; with `async_op`, what it returns waits for all."""
    works = [
        dist.all_gather_into_tensor(output, tensor, group=group, async_op=True)
        for output, tensor in zip(output_tensors, input_tensors, strict=True)
    ]
    work = JoinedWork(works)
    return work if async_op else work.wait()


def monitored_barrier(
    group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False,
    prof: bool = False, log_name: str = "monitored_barrier", debug: Any = None,
) -> None:  # fmt: skip
    """As torch.distributed's."""
    if wait_all_ranks:
        dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=True)
    else:
        comm.monitored_barrier(group=group, timeout=timeout)


class P2POp(dist.P2POp):
    """One `isend` or `irecv`, torch's or this module's, for `batch_isend_irecv`."""

    def __new__(cls, op: Any, tensor: Tensor, peer: int, group: Group = None, tag: int = 0) -> P2POp:
        made: P2POp = super().__new__(cls, _TORCHS.get(op, op), tensor, peer, group, tag)
        return made

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: Group = None, tag: int = 0) -> None:
        super().__init__(_TORCHS.get(op, op), tensor, peer, group, tag)


# torch looks at the function itself.
_TORCHS: dict[Any, Any] = {isend: dist.isend, irecv: dist.irecv}


def has_all_gather_into_tensor() -> bool:
    """True: every torch that anyaccel runs with has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True: every torch that anyaccel runs with has it."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: every torch that anyaccel runs with has it."""
    return True


def has_coalescing_manager() -> bool:
    """False: `all_gather_coalesced` does without."""
    return False


cover(globals())
