# SPDX-License-Identifier: Apache-2.0
"""The process group of the ranks that share a model, and how they load together and draw the same random numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from anyaccel import comm, env
from anyaccel.accelerator import get_accelerator
from anyaccel.comm import shm
from anyaccel.comm.heartbeat import get_heartbeat
from anyaccel.errors import UsageError
from anyaccel.inference.native.loading_watch import LoadingRanks
from anyaccel.inference.native.rendezvous import connect_ranks
from anyaccel.inference.native.runtime import Callbacks, NativeModel, RankPlace
from anyaccel.inference.options import ModelOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Groups of this rank by their size, for each default group; engines share them.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()


def model_group(options: ModelOptions) -> tuple[dist.ProcessGroup | None, int]:
    """The group of consecutive ranks that share the model, this one among them, and its rank in it.

    Raises:
        UsageError: they do not divide the ranks of the job.
    """
    count = options.ranks
    accelerator = get_accelerator()
    accelerator.set_device(comm.get_local_rank())
    if count == 1:
        return None, 0
    comm.init_distributed()
    world = comm.get_world_size()
    if world % count:
        asked = f"tensor_parallel tp_size={options.tp}"
        if options.pp > 1:
            asked += f" with pipeline_parallel size={options.pp}"
        raise UsageError(
            f"{asked} does not divide the {world} ranks of this job; start it with `anyaccel run --num_accelerators "
            f"{count} ...`"
        )
    everyone = dist.group.WORLD
    if world == count or everyone is None:
        return everyone, comm.get_rank()
    groups = _groups.setdefault(everyone, {})
    if count not in groups:
        for first in range(0, world, count):  # new_group is collective over all ranks
            made = comm.new_group(list(range(first, first + count)))
            if first <= comm.get_rank() < first + count:
                groups[count] = made
    return groups[count], comm.get_rank() % count


def gather_hosts(group: dist.ProcessGroup) -> list[str]:
    """The host of each rank, which is equal for ranks that can share memory; a collective call."""
    return [str(host) for host in shm.exchange_objects(group, shm.host_identity())]


def group_place(options: ModelOptions, on_cpu: bool) -> RankPlace:
    """This rank's place among those of the job that share the model; a collective call.

    Raises:
        UsageError: see `model_group`.
    """
    group, rank = model_group(options)
    if group is None:
        return RankPlace(on_host=1, on_cpu=on_cpu)
    hosts = gather_hosts(group)
    return RankPlace(rank, hosts.count(hosts[rank]), on_cpu, group, partial(_connect, group, hosts))


def _connect(
    group: dist.ProcessGroup,
    hosts: Sequence[str],
    load: Callable[[Callbacks], NativeModel],
    callbacks: Callbacks,
    source: Path | None,
    wire_dtype: str,
) -> NativeModel:
    """See `Connect`.

    On several hosts the ranks watch each other: a load may take as long as it needs, and a rank that ends, is stopped
    or hangs meanwhile is named.
    """
    heartbeat = get_heartbeat(group, hosts)
    ranks = None
    if heartbeat is not None:
        ranks = LoadingRanks(heartbeat, group.rank(), env.ANYACCEL_COMM_TIMEOUT.get())
        callbacks = replace(callbacks, check=ranks.check)

    def exchange(value: object) -> list[object]:
        if ranks is not None:
            ranks.meet()
        return shm.exchange_objects(group, value)

    return connect_ranks(exchange, lambda: load(callbacks), hosts=hosts, source=source, wire_dtype=wire_dtype)


def synchronise_sampling(arguments: dict[str, Any], group: dist.ProcessGroup | None) -> None:
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
