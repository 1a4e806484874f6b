# SPDX-License-Identifier: Apache-2.0
"""The process group of the ranks that share a model, and how they load together and draw the same random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from anyaccel import comm, env
from anyaccel.accelerator import get_accelerator
from anyaccel.comm import shm
from anyaccel.comm.heartbeat import heartbeat_of
from anyaccel.errors import UsageError
from anyaccel.inference.native import joining
from anyaccel.inference.native.loading_watch import LoadingRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyaccel.inference.native.runtime import NativeModel, Progress

# Tensor-parallel groups of this rank by tp_size, for each default group; engines share them.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def tp_group(tp_size: int, asked: str = "") -> tuple[dist.ProcessGroup | None, int]:
    """The group of consecutive ranks to which this rank belongs, and its rank in it.

    Args:
        asked: the options that ask for this number of ranks, for errors.

    Raises:
        UsageError: tp_size does not divide the ranks of the job.
    """
    accelerator = get_accelerator()
    accelerator.set_device(comm.get_local_rank())
    if tp_size == 1:
        return None, 0
    comm.init_distributed()
    world = comm.get_world_size()
    if world % tp_size:
        raise UsageError(
            f"{asked or f'tensor_parallel tp_size={tp_size}'} does not divide the {world} ranks of this job; start it "
            f"with `anyaccel run --num_accelerators {tp_size} ...`"
        )
    everyone = dist.group.WORLD
    if world == tp_size or everyone is None:
        return everyone, comm.get_rank()
    groups = _groups.setdefault(everyone, {})
    if tp_size not in groups:
        for first in range(0, world, tp_size):  # new_group is collective over all ranks
            made = comm.new_group(list(range(first, first + tp_size)))
            if first <= comm.get_rank() < first + tp_size:
                groups[tp_size] = made
    return groups[tp_size], comm.get_rank() % tp_size


def hosts_of(group: dist.ProcessGroup | None) -> list[str]:
    """The host of each rank, which is equal for ranks that can share memory; a collective call."""
    return [] if group is None else [str(host) for host in shm.exchange_objects(group, shm.host_identity())]


def together(
    group: dist.ProcessGroup | None,
    work: Callable[[Progress | None], NativeModel],
    hosts: Sequence[str] = (),
    source: Path | None = None,
    wire_dtype: str = "auto",
    progress: Progress | None = None,
) -> NativeModel:
    """Load this rank's part of a model and connect the ranks; if one fails, all raise an error.

    On several hosts the ranks watch each other: a load may take as long as it needs, and a rank that ends, is stopped
    or hangs meanwhile is named.

    Args:
        work: loads this rank's part, and calls what it is given with (bytes done, bytes in all).
        hosts: the result of `hosts_of`; () if all ranks are on one host.
        source: the model's folder or file; None for one in memory.
        wire_dtype: see TensorParallelConfig.
        progress: called by `work`.

    Raises:
        AnyAccelError: this rank's own error.
        OtherRankError: that of another rank.
        CommTimeoutError, PeerLostError: a rank is lost.
    """
    if group is None:
        return work(progress)
    watch = heartbeat_of(group, hosts)
    ranks = None if watch is None else LoadingRanks(watch, group.rank(), env.ANYACCEL_COMM_TIMEOUT.get())

    def exchange(value: object) -> list[object]:
        if ranks is not None:
            ranks.meet()
        return shm.exchange_objects(group, value)

    told = progress if ranks is None else ranks.progress(progress)
    return joining.together(exchange, lambda: work(told), hosts=hosts, source=source, wire_dtype=wire_dtype)


def in_step(arguments: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Make Hugging Face's own loop choose the same tokens on every rank: broadcast rank 0's random state and scores.

    Args:
        arguments: keyword arguments of `generate`, changed in place.

    Raises:
        UsageError: max_time is among them.
    """
    if group is None:
        return
    if arguments.get("max_time") is not None:
        raise UsageError("max_time would end the ranks at different tokens: use max_new_tokens with tensor parallelism")
    from transformers import LogitsProcessorList

    accelerator = get_accelerator()
    device = accelerator.device()
    state = accelerator.get_rng_state().to(device)
    accelerator.set_rng_state(comm.inference_broadcast(state, group=group).cpu())
    processors = LogitsProcessorList(arguments.pop("logits_processor", None) or [])
    processors.append(lambda _ids, scores: comm.inference_broadcast(scores, group=group))
    arguments["logits_processor"] = processors
