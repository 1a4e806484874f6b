# SPDX-License-Identifier: Apache-2.0
"""Finds out which ranks of a group are on one host, and connects them through shared memory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from anyaccel import _native, env
from anyaccel.comm.rendezvous import Rendezvous
from anyaccel.comm.shm_group import ShmProcessGroup
from anyaccel.errors import AnyAccelError, CommError
from anyaccel.launch.cluster.machines import host_identity as host_identity

logger = logging.getLogger(__name__)

NAME = "shm"
_BUFFERS = 3
_ALIGNMENT = 64
_MAILBOX_BYTES = 256 << 10  # the most for messages from one rank to one other

# A function that exchanges texts: given this rank's text, it returns the texts of all ranks, in rank order.
Exchange = Callable[[str], list[str]]


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def exchange_objects(group: dist.ProcessGroup, value: object) -> list[object]:
    """Every rank's `value` in rank order; a collective call."""
    received: list[object] = [None] * group.size()
    dist.all_gather_object(received, value, group=group)
    return received


def sizes(world_size: int, total_bytes: int) -> tuple[int, int]:
    """How a group of `world_size` divides the `total_bytes` that all its ranks may use together.

    Returns:
        Bytes of one of the three buffers of a rank, and of a rank's mailboxes: three quarters and one quarter, both at
        least what they need to work.
    """
    pair = min(total_bytes // 4 // world_size**2, _MAILBOX_BYTES)
    mailboxes = _native.Messages.bytes_a_rank(world_size, pair)
    share = (total_bytes - min(mailboxes * world_size, total_bytes // 2)) // (_BUFFERS * world_size)
    return max(share // _ALIGNMENT, world_size) * _ALIGNMENT, mailboxes


def _offer(rank: int, size: int, timeout_s: float, kind: str) -> tuple[_native.ShmGroup | None, dict[str, Any]]:
    """This rank's segment, and the handshake with which its peers can map it."""
    handshake: dict[str, Any] = {"host": "", "pid": os.getpid(), "pids": "", "segment": "", "error": ""}
    try:
        handshake["host"], handshake["pids"] = host_identity(), _pid_namespace()
        buffer, mailboxes = sizes(size, env.ANYACCEL_SHM_BYTES.get())
        native = _native.ShmGroup(rank, size, buffer, timeout_s, kind == "memfd", mailboxes)
    except (OSError, ValueError, AnyAccelError) as problem:
        # The peers are told of the failure, so that all ranks decide alike.
        handshake["error"] = f"{type(problem).__name__}: {problem}"
        return None, handshake
    handshake["segment"] = native.name
    return native, handshake


def _join(rank: int, size: int, timeout_s: float, exchange: Exchange) -> tuple[_native.ShmGroup | None, list[str], str]:
    """Connect the ranks: returns the native group or None, the host of each rank, and an error if they share a host.

    memfd comes first, as it neither depends on the size of /dev/shm nor can be left behind. Ranks that cannot open each
    other's memfd (containers with separate pid namespaces) use /dev/shm.
    """
    hosts: list[str] = []
    problems: list[str] = []
    for kind in ("memfd", "posix"):
        native, own = _offer(rank, size, timeout_s, kind)
        handshakes = [json.loads(text) for text in exchange(json.dumps(own))]
        hosts = [handshake["host"] for handshake in handshakes]
        problems = [f"rank {r}: {handshake['error']}" for r, handshake in enumerate(handshakes) if handshake["error"]]
        if not problems and len(set(hosts)) > 1:
            return None, hosts, ""
        error = ""
        if not problems and native is not None:
            # A pid of another namespace is meaningless here; the death of such a peer is noticed by the deadline only.
            pids = [handshake["pid"] if handshake["pids"] == own["pids"] else 0 for handshake in handshakes]
            try:
                native.connect([handshake["segment"] for handshake in handshakes], pids)
            except (OSError, ValueError) as problem:
                error = str(problem)
        problems = problems or [f"rank {r}: {text}" for r, text in enumerate(exchange(error)) if text]
        if not problems and native is not None:
            native.unlink()  # every rank has mapped every segment
            return native, hosts, ""
    return None, hosts, "; ".join(problems)


def connect(group: dist.ProcessGroup) -> _native.ShmGroup | None:
    """Set up shared memory among the ranks of a group of another backend; a collective call.

    Returns:
        The transport, or None when the ranks are not all on this host or one of them cannot map shared memory: every
        rank gets None then, and the reason is logged.
    """

    def exchange(text: str) -> list[str]:
        return [str(value) for value in exchange_objects(group, text)]

    native, hosts, problem = _join(group.rank(), group.size(), env.ANYACCEL_COMM_TIMEOUT.get(), exchange)
    if native is None and not problem:
        logger.info("group of %d ranks on %d hosts: no shared memory", group.size(), len(set(hosts)))
    elif native is None:
        logger.warning("shared memory is not used, torch.distributed is: %s", problem)
    return native


def create_local(store: Store, rank: int, size: int, timeout: timedelta) -> ShmProcessGroup:
    """A group of ranks that are all on this host; every rank calls it, with a store of their own (a PrefixStore).

    Raises:
        CommTimeoutError: a rank did not come; it is named.
        CommError: the ranks are on several hosts, or cannot share memory.
    """
    group, hosts, _ = try_local(store, rank, size, timeout)
    if group is None:
        raise CommError(f"{size} ranks are on {len(set(hosts))} hosts: they cannot share memory")
    return group


def try_local(
    store: Store, rank: int, size: int, timeout: timedelta
) -> tuple[ShmProcessGroup | None, list[str], Store]:
    """Try to create the group of `create_local`.

    Returns:
        The group, None if the ranks are on several hosts; the identity of each rank's host; and a store that no other
        group uses.
    """
    env.ANYACCEL_ISA.get()  # native code reads it later, where the error for a wrong value would be less clear
    rendezvous = Rendezvous(PrefixStore("anyaccel-shm", store), rank, size, timeout)
    native, hosts, problem = _join(rank, size, timeout.total_seconds(), rendezvous)
    if problem:
        raise CommError(f"the ranks of this host cannot share memory: {problem}")
    if native is None:
        return None, hosts, rendezvous.store
    native.barrier()  # all ranks have read the store
    rendezvous.tidy()
    return ShmProcessGroup(store, native, rank, size), hosts, rendezvous.store
