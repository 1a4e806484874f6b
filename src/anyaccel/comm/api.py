# SPDX-License-Identifier: Apache-2.0
"""Adds to torch.distributed: inference collectives, symmetric tensors, `abort` and barriers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from anyaccel import _native
from anyaccel.comm import events, shm, symmetric
from anyaccel.comm.collectives import Collectives
from anyaccel.comm.dtypes import dtype_code, op_code
from anyaccel.comm.heartbeat import known_heartbeat
from anyaccel.comm.hierarchy import HierarchicalGroup
from anyaccel.comm.shm_group import ShmProcessGroup
from anyaccel.comm.tensors import InPlaceTarget, values
from anyaccel.comm.untraced import untraced
from anyaccel.errors import AnyAccelError, CommError, UsageError

_SUM = ReduceOp.SUM

# The shared-memory transport of each group, or None. An entry goes when its group is destroyed.
_transports: WeakKeyDictionary[dist.ProcessGroup, Collectives | None] = WeakKeyDictionary()


@contextmanager
def _errors_as_comm_error(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Turn torch.distributed's errors into CommError; it raises RuntimeError for all of them."""
    try:
        yield
    except AnyAccelError:
        raise
    except RuntimeError as error:
        watch = known_heartbeat(group)
        cause = None if watch is None else watch.explain(what, error)
        raise cause or CommError(f"{what}: {error}") from error


def _shared_memory_of(group: dist.ProcessGroup) -> Collectives | None:
    """The shared-memory transport of a group; the first call, which is collective, sets it up."""
    try:
        return _transports[group]
    except KeyError:
        pass
    made: Collectives | None
    if isinstance(group, ShmProcessGroup):
        made = group.collectives
    else:
        with _errors_as_comm_error("setting up shared memory for a group", group):
            native = shm.connect(group)
        made = None if native is None else Collectives(native, group.rank(), group.size())
    _transports[group] = made
    if made is not None:
        _native.remember_group(group, made.native)
    return made


def _run_in_order(group: dist.ProcessGroup, name: str, tensor: torch.Tensor, run: Callable[[], None]) -> None:
    """Call `run` after the group's asynchronous operations."""
    if isinstance(group, ShmProcessGroup):
        group.run(name, [tensor], run)
    else:
        run()


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    world = dist.group.WORLD
    if world is None:
        raise UsageError("no process group: call anyaccel.comm.init_distributed() first")
    return world


@untraced
def _inference_all_reduce(
    tensor: torch.Tensor, op: ReduceOp.RedOpType = _SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """All-reduce in place with low latency; every rank of the group must call it with the same shape, dtype and op.

    A CPU tensor goes through shared memory when the group's ranks are on one host: float32, bfloat16 and float16 are
    accumulated in fp32 in rank order and rounded once, so the result is the same bits on every rank. Anything else
    goes through torch.distributed. Autograd does not see it.

    Args:
        tensor: any shape, any layout, any dtype; changed in place.
        op: SUM by default.
        group: the default group when None.

    Returns:
        `tensor`.

    Raises:
        PeerLostError: a rank has ended.
        CommTimeoutError: a rank did not come within the group's timeout.
        CommError: the ranks' calls differ, or an earlier error broke the group.
    """
    world = _group(group)
    if tensor.is_cpu and (transport := _shared_memory_of(world)) is not None:
        code = op_code(op)
        _run_in_order(world, "all_reduce", tensor, lambda: transport.all_reduce(tensor, code))
        return tensor
    if tensor.numel() == 0 or world.size() == 1:
        return tensor
    dense = values(tensor) if tensor.is_cpu else tensor.detach().contiguous()
    with _errors_as_comm_error("all_reduce through torch.distributed", world):
        if op == ReduceOp.AVG:  # gloo has none
            dist.all_reduce(dense, op=ReduceOp.SUM, group=world)
            dense.div_(world.size())
        else:
            dist.all_reduce(dense, op=op, group=world)
    return _copy_back(tensor, dense)


@untraced
def inference_broadcast(tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Broadcast in place with low latency: through shared memory for CPU tensors of one host, any dtype.

    Args:
        tensor: same shape and dtype on every rank; rank `src` of the group gives the values.
        src: rank inside the group.
        group: the default group when None.

    Returns:
        `tensor`.

    Raises:
        As `inference_all_reduce`.
    """
    world = _group(group)
    if tensor.is_cpu and (transport := _shared_memory_of(world)) is not None:
        _run_in_order(world, "broadcast", tensor, lambda: transport.broadcast(tensor, src))
        return tensor
    dense = values(tensor) if tensor.is_cpu else tensor.detach().contiguous()
    with _errors_as_comm_error("broadcast through torch.distributed", world):
        dist.broadcast(dense, src=dist.get_global_rank(world, src), group=world)
    return _copy_back(tensor, dense)


@untraced
def _all_reduce_add_rms_norm(
    partial: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Fuse what stands between two layers of a tensor-parallel decoder into one call, in place.

    residual += sum over the ranks of partial; partial = residual / sqrt(mean(residual ** 2) + eps) * weight, over the
    last dimension. The sum is rounded to the dtype before it is added, everything else is fp32 (RMS norm: Zhang and
    Sennrich, 2019). Autograd does not see it.

    Args:
        partial, residual: [..., width] of one shape and dtype; both are changed.
        weight: [width], of the same dtype.
        eps: added to the mean square.
        group: the default group when None.

    Returns:
        `partial`.

    Raises:
        UsageError: shapes or dtypes do not fit together.
        CommError: as `inference_all_reduce`.
    """
    if partial.shape != residual.shape or weight.shape != partial.shape[-1:] or partial.dim() == 0:
        raise UsageError(
            f"all_reduce_add_rms_norm of {list(partial.shape)} and {list(residual.shape)} with a weight of "
            f"{list(weight.shape)}: needs equal shapes and a weight of the last dimension"
        )
    if not partial.dtype == residual.dtype == weight.dtype:
        raise UsageError(
            f"all_reduce_add_rms_norm of {partial.dtype}, {residual.dtype} and {weight.dtype}: needs one dtype"
        )
    world = _group(group)
    transport = (
        _shared_memory_of(world)
        if partial.is_cpu and partial.dtype in (torch.float32, torch.bfloat16, torch.float16)
        else None
    )
    if transport is not None:
        gain = values(weight)
        summed, kept = InPlaceTarget(partial), InPlaceTarget(residual)
        rows = math.prod(partial.shape[:-1])
        addresses = summed.memory.data_ptr(), kept.memory.data_ptr(), gain.data_ptr()
        code = dtype_code(partial.dtype)
        _run_in_order(
            world,
            "all_reduce_add_rms_norm",
            partial,
            lambda: transport.native.all_reduce_add_rms_norm(*addresses, eps, rows, gain.numel(), code),
        )
        summed.store()
        kept.store()
        return partial
    inference_all_reduce(partial, group=world)
    with torch.no_grad():
        residual.add_(partial)
        wide = residual.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return partial.copy_(wide * scale * weight.float())


inference_all_reduce, all_reduce_add_rms_norm = _native.make_fast(
    _inference_all_reduce,
    _all_reduce_add_rms_norm,
    # Where torch keeps the default group: on an object since 2.1, in the module before.
    vars(distributed_c10d._world) if "_default_pg" in vars(distributed_c10d._world) else vars(distributed_c10d),
    torch.Tensor,
    torch.nn.Parameter,
    _OPS := [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX],
    [hash(ReduceOp(op)) for op in _OPS],
    events.WATCHERS,
)


@untraced
def symm_empty(
    shape: Sequence[int] | int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor that lives in memory which all ranks of the group share; a collective call, with equal arguments.

    All-reduces of it, or of dense parts at the same place on all ranks, copy nothing. The memory is beside what
    ANYACCEL_SHM_BYTES allows, and is given back when the tensor and its views are gone.

    Args:
        shape: as of `torch.empty`.
        dtype: default: torch's default dtype.
        group: the default group when None; its ranks must be on one host.

    Raises:
        CommError: the ranks cannot share memory, or called it with different sizes.
    """
    transport = _shared_memory_of(_group(group))
    if transport is None:
        raise CommError("symmetric tensors need a group whose ranks are all on one host")
    return symmetric.allocate(transport, (shape,) if isinstance(shape, int) else tuple(shape), dtype)


@untraced
def symm_zeros(
    shape: Sequence[int] | int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The same as `symm_empty`, but filled with zeros."""
    return symm_empty(shape, dtype, group).zero_()


def _copy_back(tensor: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)
    return tensor


@untraced
def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: timedelta | None = None) -> None:
    """A barrier whose error names the ranks that did not come.

    Args:
        group: the default group when None.
        timeout: default: the group's.

    Raises:
        CommTimeoutError, PeerLostError: with the missing ranks of the group and their process numbers.
        UsageError: the group's backend has no such barrier.
    """
    world = _group(group)
    if isinstance(world, (ShmProcessGroup, HierarchicalGroup)):
        world.monitored_barrier(timeout)
        return
    transport = _shared_memory_of(world)
    if transport is not None:
        transport.native.barrier(0.0 if timeout is None else timeout.total_seconds())
        return
    try:
        dist.monitored_barrier(world, timeout)
    except ValueError as error:
        raise UsageError(str(error)) from None


@untraced
def abort(group: dist.ProcessGroup | None = None) -> None:
    """End what waits in the group, here and on the peers, with an error; callable from any thread.

    The group is not usable afterwards; `destroy_process_group` still is.
    """
    world = _group(group)
    transport = _transports.get(world)
    if transport is not None:
        transport.native.abort()
    world.abort()
