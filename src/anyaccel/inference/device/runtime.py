# SPDX-License-Identifier: Apache-2.0
"""From a model's files, or a model in memory, to a decoder on the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from anyaccel.accelerator import Capability, get_accelerator
from anyaccel.errors import UsageError
from anyaccel.inference.device.model import DeviceModel
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.weights import DTYPES, DeviceWeights
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.runtime import NativeModel, Place, open_checkpoint, plan_of
from anyaccel.inference.native.shard import shard

if TYPE_CHECKING:
    from anyaccel import _llm

# Precisions and how `_llm` calls them.
_FLOATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
_SHARE_OF_MEMORY = 0.75  # of what the device has left beside the weights: the most that the cache may grow to
_UNKNOWN_MEMORY = 1 << 62


def load_device(
    model: Any,
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = "bf16",
    rank: int = 0,
    size: int = 1,
    cache_dtype: str | None = None,
    cache_limit: int = 0,
    group: dist.ProcessGroup | None = None,
    on_host: int = 1,
    progress: Callable[[int, int], object] | None = None,
    release: bool = False,
    check: Callable[[], object] | None = None,
) -> NativeModel:
    """Make the decoder of a model on `get_accelerator()`: `load_native` with another executor.

    Weights go to the device as they are read; the host has a few megabytes of them at a time.

    Args:
        dtype: fp32, bf16 or fp16; None or "auto": that of the file, bf16 for a quantised one.
        cache_dtype: of keys and values; None: as `dtype`, and there is no other.
        rank, size: of tensor parallelism; `group` has these ranks, of which `on_host` share this host's memory.
        cache_limit: most bytes of keys and values; 0: three quarters of what the device has left.

    Raises:
        Unsupported, ModelError, UsageError: see `load_native`.
    """
    if size > 1 and group is None:
        raise UsageError(f"size={size}: the ranks that share a model on a device need a process group")
    place = Place(rank, size)
    accelerator = get_accelerator()
    checkpoint = open_checkpoint(model, config, release)
    if check is not None:
        check()
    asked = None if dtype == "auto" else dtype
    if asked is not None and asked not in _FLOATS:
        raise UsageError(f"dtype={asked!r}: runtime='device' has {', '.join(_FLOATS)} in this version")
    plan = plan_of(checkpoint, Precision(asked), place)
    if asked is None:
        asked = _precision_of({shape.format for shape in plan.matrices if shape.name != "router"})
        plan = plan_of(checkpoint, Precision(asked), place)
    kind = DTYPES[_FLOATS[asked]]
    if cache_dtype not in (None, asked):
        raise UsageError(f"kv_cache={cache_dtype!r}: runtime='device' keeps keys and values in the model's own {asked}")
    weights = DeviceWeights(plan.spec, plan.shapes(), kind, accelerator.device(accelerator.current_device()))

    def report(done: int, total: int) -> None:
        if check is not None:
            check()
        if progress is not None:
            progress(done, total)

    # Only what fills weights is asked of a model by the plan.
    plan.fill(cast("_llm.Model", weights), report)
    weights.finish()
    limit = cache_limit
    if limit == 0:
        known = accelerator.has(Capability.MEMORY_SIZE)
        limit = int(accelerator.available_memory() * _SHARE_OF_MEMORY) if known else _UNKNOWN_MEMORY
        if weights["embed"].is_cpu:
            limit //= on_host
    precise = torch.float64 if accelerator.has(Capability.FP64) else torch.float32
    ranks = None
    if size > 1 and group is not None:
        ranks = TensorRanks(group, [shard(plan.whole, each, size).vocab_count for each in range(size)])
    made = DeviceModel(plan.spec, weights, kind, limit, precise, ranks)
    return NativeModel(
        cast("_llm.Model", made),
        plan.spec,
        plan.whole,
        checkpoint.config,
        checkpoint.generation_config,
        None if dtype == "auto" else dtype,
        plan.forms(),
        rank,
        size,
    )


def _precision_of(formats: set[str]) -> str:
    """The float that all matrices have in the file, else bfloat16."""
    names = {name for name, kind in _FLOATS.items() if kind in formats}
    return names.pop() if len(names) == 1 and formats <= set(_FLOATS.values()) else "bf16"
