# SPDX-License-Identifier: Apache-2.0
"""The shared-memory transport of a process group whose ranks are all on one host."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from anyaccel import _native, env
from anyaccel.errors import AnyAccelError

logger = logging.getLogger(__name__)

# Codes of csrc/comm/reduce_kernels.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_BUFFERS = 3
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Card:
    """What a rank tells its peers about itself when a transport is set up."""

    host: str
    pid: int
    pid_namespace: str
    segment: str
    error: str


def _host_identity() -> str:
    """Equal for two processes if and only if they can map each other's POSIX shared memory."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers of one host share the boot id, but each may have a /dev/shm of its own.
    shm = Path("/dev/shm").stat()
    return f"{boot_id}:{shm.st_dev}:{shm.st_ino}"


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _exchange(group: dist.ProcessGroup, value: object) -> list[object]:
    received: list[object] = [None] * group.size()
    dist.all_gather_object(received, value, group=group)
    return received


def buffer_bytes(world_size: int, total_bytes: int) -> int:
    """Bytes of one of the three buffers of a rank when a group of `world_size` may use `total_bytes` in all."""
    share = total_bytes // (_BUFFERS * world_size)
    return max(share // _ALIGNMENT, world_size) * _ALIGNMENT


def connect(group: dist.ProcessGroup) -> _native.ShmGroup | None:
    """Set up shared memory among the ranks of `group`; a collective call.

    Returns:
        The transport, or None when the ranks are not all on this host or one of them cannot map shared memory: every
        rank gets None then, and the reason is logged.
    """
    rank = group.rank()
    native: _native.ShmGroup | None = None
    host = segment = mine = error = ""
    try:
        host = _host_identity()
        size = buffer_bytes(group.size(), env.ANYACCEL_SHM_BYTES.get())
        native = _native.ShmGroup(rank, group.size(), size, env.ANYACCEL_COMM_TIMEOUT.get())
        segment, mine = native.name, _pid_namespace()
    except (OSError, ValueError, AnyAccelError) as problem:
        # Told to the peers, so that all take the same way.
        error = f"{type(problem).__name__}: {problem}"
    cards = [
        card for card in _exchange(group, _Card(host, os.getpid(), mine, segment, error)) if isinstance(card, _Card)
    ]
    problems = [f"rank {r}: {card.error}" for r, card in enumerate(cards) if card.error]
    if not problems and len({card.host for card in cards}) > 1:
        logger.info("group of %d ranks spans hosts: no shared memory", group.size())
        return None
    if not problems and native is not None:
        # A pid of another namespace means nothing here; such a peer's death is noticed by the deadline only.
        pids = [card.pid if card.pid_namespace == mine else 0 for card in cards]
        try:
            native.connect([card.segment for card in cards], pids)
        except OSError as problem:
            error = str(problem)
    if not problems:
        problems = [f"rank {r}: {text}" for r, text in enumerate(_exchange(group, error)) if text]
    if problems or native is None:
        logger.warning("shared memory is not used, torch.distributed is: %s", "; ".join(problems))
        return None
    native.unlink()  # every rank has mapped every segment
    return native
