# SPDX-License-Identifier: Apache-2.0
"""Starts torch.distributed: how the ranks of a job meet, and over which backend."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed hides them from mypy
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from anyaccel import env
from anyaccel.accelerator import get_accelerator
from anyaccel.comm import shm
from anyaccel.errors import AnyAccelError, CommError, CommTimeoutError, UsageError
from anyaccel.launch.counts import shorten
from anyaccel.launch.plan.ancestors import read_ancestors
from anyaccel.launch.plan.local_rank import RankFromEnvironment, is_claimed_twice, launcher_below
from anyaccel.numerals import parse_integer

logger = logging.getLogger(__name__)

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(
    dist_backend: str | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed for this job; does nothing when it runs already.

    Args:
        dist_backend: name of the backend; default: the fastest that works for these ranks, which the log tells
            (level INFO) and `torch.distributed.get_backend()`: `shm` for CPU tensors, else the accelerator's own
            (`communication_backend_name()`).
        timeout: how long a collective may wait; default: ANYACCEL_COMM_TIMEOUT seconds.
        init_method, rank, world_size: as in `torch.distributed.init_process_group`; default: the environment that
            `anyaccel run` and `torchrun` set. Without that environment the job is this one process. Where an MPI or
            Slurm has started this process below one of those, its rank and size count and replace them.

    Raises:
        UsageError: the environment is incomplete, not a number or of another job; the message names the variable.
        CommError: the ranks did not come together.
    """
    if dist.is_initialized():
        return
    env.ANYACCEL_ISA.get()  # native code reads it later, where the error for a wrong value would be less clear
    limit = timeout or timedelta(seconds=env.ANYACCEL_COMM_TIMEOUT.get())
    if rank < 0 and (init_method is None or init_method.startswith("env:")):
        take_place_of_inner_launcher()
    try:
        if init_method is not None or rank >= 0 or world_size > 0:
            store, rank, world_size = next(rendezvous(init_method or "env://", rank, world_size, timeout=limit))
        elif not any(name in os.environ for name in _LAUNCH_VARIABLES):
            store, rank, world_size = HashStore(), 0, 1
        else:
            store, rank, world_size = store_from_environment(limit)
    except AnyAccelError:
        raise
    except (RuntimeError, ValueError, OverflowError, AssertionError, OSError) as error:
        raise CommError(f"the ranks could not connect to each other: {error}") from error
    if dist_backend is not None:
        _start(dist_backend, store, rank, world_size, limit)
        return
    backends = _by_speed()
    for backend in backends:
        try:
            _start(backend, store, rank, world_size, limit)
        except CommTimeoutError:
            raise
        except CommError as error:  # every rank gets one, so all of them go on to the next backend
            if backend == backends[-1]:
                raise
            logger.warning("backend %s is passed over: %s", backend, error)
            continue
        logger.info("backend %s for %d ranks", backend, world_size)
        return


def _by_speed() -> list[str]:
    """The backends that can carry the accelerator's tensors, the fastest first."""
    accelerator = get_accelerator()
    own = accelerator.communication_backend_name()
    shared = accelerator.spec.device_type in dist.Backend.backend_capability.get(shm.NAME, ())
    return [shm.NAME, own] if shared else [own]


def _start(backend: str, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"anyaccel-{backend}", store),
            timeout=timeout,
            rank=rank,
            world_size=world_size,
        )
    except AnyAccelError:
        raise
    except (RuntimeError, ValueError, OverflowError, AssertionError, OSError) as error:
        raise CommError(f"the ranks could not connect to each other with backend {backend!r}: {error}") from error


def store_from_environment(timeout: timedelta) -> tuple[Store, int, int]:
    """The store at MASTER_ADDR and MASTER_PORT, this rank and the number of ranks, from the launcher's variables."""
    missing = [name for name in _LAUNCH_VARIABLES if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: start the script with `anyaccel run` (or torchrun), or set all of "
            + ", ".join(_LAUNCH_VARIABLES)
        )
    rank, world_size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not (0 <= rank < world_size and 0 < port < 65536):
        raise UsageError(
            f"RANK={rank}, WORLD_SIZE={world_size}, MASTER_PORT={port} are not valid together: "
            "start the script with `anyaccel run`"
        )
    address = os.environ["MASTER_ADDR"]
    if not _is_loopback(address):
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        return store, rank, world_size
    # A job on one machine must not listen on other interfaces than loopback: torch's store would listen on all, and
    # gloo on the one that the host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # torchrun's agent hosts the store itself, and sets this variable; its workers are all clients.
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
    return store, rank, world_size


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def take_place_of_inner_launcher() -> None:
    """Set RANK, WORLD_SIZE etc. from an MPI or Slurm launcher if their present values come from a launcher above it.

    Raises:
        UsageError: the ranks cannot meet at MASTER_ADDR and MASTER_PORT of the launcher above.
    """
    ancestors = read_ancestors(os.environ)
    found = launcher_below(os.environ, ancestors)
    if found is None or ancestors is None or found.rank is None or found.world_size is None:
        return
    above = os.environ.get("WORLD_SIZE", "1")
    if above != "1" and ancestors.generation(("MASTER_PORT",)) >= ancestors.generation(("WORLD_SIZE",)):
        raise UsageError(
            f"MASTER_PORT={os.environ.get('MASTER_PORT', '')} belongs to a job of {above} workers, each of which may "
            f"have started {found.source}: give each of these jobs its own MASTER_PORT"
        )
    address = os.environ.get("MASTER_ADDR", "")
    if found.world_size > found.local_size and _is_loopback(address):
        raise UsageError(
            f"{found.source} started {found.world_size} ranks on several hosts, and MASTER_ADDR={address} "
            "comes from a job on one host that started it: export the address of rank 0"
        )
    logger.info("rank %d of %d: %s counts, not RANK of above it", found.rank, found.world_size, found.source)
    os.environ.update(place_variables(found))


def place_variables(found: RankFromEnvironment) -> dict[str, str]:
    """torch's variables (RANK, WORLD_SIZE ...) for a rank that a launcher has given in variables of its own."""
    return {
        "RANK": str(found.rank),
        "WORLD_SIZE": str(found.world_size),
        "LOCAL_RANK": str(found.local_rank),
        "LOCAL_WORLD_SIZE": str(found.local_size),
        "LOCAL_SIZE": str(found.local_size),
    }


def get_local_rank() -> int:
    """This worker's number on its host: LOCAL_RANK, 0 when it is not set.

    Where LOCAL_RANK is of a launcher above an MPI or Slurm that has started this process, it is that one's number.
    """
    if is_claimed_twice(os.environ):  # otherwise only a variable is read, as scripts call this in loops
        found = launcher_below(os.environ, read_ancestors(os.environ))
        if found is not None:
            return found.local_rank
    number = _number("LOCAL_RANK", "0")
    if number < 0:
        raise UsageError(f"LOCAL_RANK={number}: must be 0 or above")
    return number


def _number(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default) or ""
    try:
        return parse_integer(text)
    except ValueError as error:
        raise UsageError(f"{name}={shorten(text)} {error}; `anyaccel run`, torchrun or an MPI sets it") from None


def new_group(ranks: list[int] | None = None, timeout: timedelta | None = None, backend: str | None = None) -> Any:
    """The same as `torch.distributed.new_group`, with ANYACCEL_COMM_TIMEOUT as the default deadline."""
    limit = timeout or timedelta(seconds=env.ANYACCEL_COMM_TIMEOUT.get())
    return dist.new_group(ranks, timeout=limit, backend=backend)
