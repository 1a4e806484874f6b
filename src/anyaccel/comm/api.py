# SPDX-License-Identifier: Apache-2.0
"""What `anyaccel.comm` adds to torch.distributed: start-up and the inference collectives."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed hides them from mypy
    HashStore,
    PrefixStore,
    TCPStore,
)
from torch.distributed import ReduceOp

from anyaccel import env
from anyaccel.accelerator import get_accelerator
from anyaccel.comm import shm
from anyaccel.comm.collectives import Collectives
from anyaccel.comm.dtypes import op_code
from anyaccel.comm.process_group import ShmProcessGroup
from anyaccel.comm.tensors import values
from anyaccel.errors import AnyAccelError, CommError, UsageError

_SUM = ReduceOp.SUM
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Shared-memory transport of each group; None: the group has none. A group that is destroyed takes its entry along.
_transports: WeakKeyDictionary[dist.ProcessGroup, Collectives | None] = WeakKeyDictionary()


def init_distributed(
    dist_backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed for this job; does nothing when it runs already.

    Args:
        dist_backend: name of the backend; default: the accelerator's (`communication_backend_name()`).
        timeout: how long a collective may wait; default: ANYACCEL_COMM_TIMEOUT seconds.
        init_method, rank, world_size: as in `torch.distributed.init_process_group`; default: the environment that
            `anyaccel run` and `torchrun` set. Without that environment the job is this one process.

    Raises:
        UsageError: the environment is incomplete or not a number; the message names the variable.
        CommError: the ranks did not come together.
    """
    if dist.is_initialized():
        return
    env.ANYACCEL_ISA.get()  # native code reads it later, where a mistake could not be told as well
    backend = dist_backend or get_accelerator().communication_backend_name()
    limit = timeout or timedelta(seconds=env.ANYACCEL_COMM_TIMEOUT.get())
    try:
        if init_method is not None or rank >= 0 or world_size > 0:
            dist.init_process_group(backend, init_method=init_method, timeout=limit, rank=rank, world_size=world_size)
        elif not any(name in os.environ for name in _LAUNCH_VARIABLES):
            dist.init_process_group(backend, store=HashStore(), timeout=limit, rank=0, world_size=1)
        else:
            _init_from_environment(backend, limit)
    except AnyAccelError:
        raise
    except (RuntimeError, ValueError, OverflowError, AssertionError, OSError) as error:
        raise CommError(f"the ranks did not come together with backend {backend!r}: {error}") from error


def _init_from_environment(backend: str, timeout: timedelta) -> None:
    missing = [name for name in _LAUNCH_VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: start the script with `anyaccel run` (or torchrun), or set all of "
            + ", ".join(_LAUNCH_VARIABLES)
        )
    try:
        rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from None
    if not (0 <= rank < world_size and 0 < port < 65536):
        raise UsageError(
            f"RANK={rank}, WORLD_SIZE={world_size}, MASTER_PORT={port} cannot be: start it with `anyaccel run`"
        )
    address = os.environ["MASTER_ADDR"]
    if not _is_loopback(address):
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
        return
    # A job of one machine: nothing of it listens on other interfaces. torch's store would listen on all of them, and
    # gloo would take the interface that the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torchrun's agent listens already and says so; its workers are all clients.
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family) if serve else None
    store = TCPStore(
        address,
        port,
        world_size,
        is_master=serve,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    dist.init_process_group(
        backend, store=PrefixStore("anyaccel", store), timeout=timeout, rank=rank, world_size=world_size
    )


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def get_local_rank() -> int:
    """This worker's number on its host: LOCAL_RANK, 0 when it is not set."""
    text = os.environ.get("LOCAL_RANK", "0")
    if not text.isdecimal():
        raise UsageError(f"LOCAL_RANK={text!r} must be a whole number")
    return int(text)


def new_group(ranks: list[int] | None = None, timeout: timedelta | None = None, backend: str | None = None) -> Any:
    """As `torch.distributed.new_group`, with ANYACCEL_COMM_TIMEOUT as the default deadline."""
    limit = timeout or timedelta(seconds=env.ANYACCEL_COMM_TIMEOUT.get())
    return dist.new_group(ranks, timeout=limit, backend=backend)


@contextmanager
def _told_as_comm_error(what: str) -> Iterator[None]:
    """torch.distributed raises RuntimeError for whatever goes wrong on the way."""
    try:
        yield
    except AnyAccelError:
        raise
    except RuntimeError as error:
        raise CommError(f"{what}: {error}") from error


def _through(group: dist.ProcessGroup) -> Collectives | None:
    """Shared memory of a group; set up by the first call, which is collective."""
    try:
        return _transports[group]
    except KeyError:
        pass
    made: Collectives | None
    if isinstance(group, ShmProcessGroup):
        made = group.collectives
    else:
        with _told_as_comm_error("setting up shared memory for a group"):
            native = shm.connect(group)
        made = None if native is None else Collectives(native, group.rank(), group.size())
    _transports[group] = made
    return made


def _in_order(group: dist.ProcessGroup, name: str, tensor: torch.Tensor, run: Callable[[], None]) -> None:
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


def inference_all_reduce(
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
    if tensor.is_cpu and (through := _through(world)) is not None:
        code = op_code(op)
        _in_order(world, "all_reduce", tensor, lambda: through.all_reduce(tensor, code))
        return tensor
    if tensor.numel() == 0 or world.size() == 1:
        return tensor
    dense = values(tensor) if tensor.is_cpu else tensor.detach().contiguous()
    with _told_as_comm_error("all_reduce through torch.distributed"):
        if op == ReduceOp.AVG:  # gloo has none
            dist.all_reduce(dense, op=ReduceOp.SUM, group=world)
            dense.div_(world.size())
        else:
            dist.all_reduce(dense, op=op, group=world)
    return _stored(tensor, dense)


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
    if tensor.is_cpu and (through := _through(world)) is not None:
        _in_order(world, "broadcast", tensor, lambda: through.broadcast(tensor, src))
        return tensor
    dense = values(tensor) if tensor.is_cpu else tensor.detach().contiguous()
    with _told_as_comm_error("broadcast through torch.distributed"):
        dist.broadcast(dense, src=dist.get_global_rank(world, src), group=world)
    return _stored(tensor, dense)


def _stored(tensor: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)
    return tensor


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
    if isinstance(world, ShmProcessGroup):
        world.monitored_barrier(timeout)
        return
    through = _through(world)
    if through is not None:
        through.native.barrier(0.0 if timeout is None else timeout.total_seconds())
        return
    try:
        dist.monitored_barrier(world, timeout)
    except ValueError as error:
        raise UsageError(str(error)) from None


def abort(group: dist.ProcessGroup | None = None) -> None:
    """End what waits in the group, here and on the peers, with an error; callable from any thread.

    The group is not usable afterwards; `destroy_process_group` still is.
    """
    world = _group(group)
    transport = _transports.get(world)
    if transport is not None:
        transport.native.abort()
    world.abort()
