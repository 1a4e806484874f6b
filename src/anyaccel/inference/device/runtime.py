# SPDX-License-Identifier: Apache-2.0
"""From a model's files, or a model in memory, to a decoder on the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from anyaccel import _llm
from anyaccel.accelerator import Capability, get_accelerator
from anyaccel.errors import UsageError
from anyaccel.inference.device.executor import DeviceExecutor
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.weights import DTYPES, DeviceWeights
from anyaccel.inference.native.formats import DEFAULT_GROUP, Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.native.runtime import NativeModel, Place, open_checkpoint, plan_of
from anyaccel.inference.native.shard import shard
from anyaccel.inference.spec.decoder import MatrixShape
from anyaccel.inference.spec.packed_formats import FORMATS, QUANTISED

# Precisions and how `_llm` calls them.
_FLOATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
_SHARE_OF_MEMORY = 0.75  # of what the device has left beside the weights: the most that the cache may grow to
_UNKNOWN_MEMORY = 1 << 62


def load_device(
    model: Any,
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = "bf16",
    group_size: int = DEFAULT_GROUP,
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
        dtype: fp32, bf16, fp16, int8 or int4; None or "auto": that of the file.
        group_size: columns that share a scale in int4.
        cache_dtype: of keys and values: with floats as `dtype`. With quantised weights it is also that of all
            arithmetic; None: bf16, or what the device has of fp16 and fp32.
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
    plan = plan_of(checkpoint, Precision(None if dtype == "auto" else dtype, group_size), place)
    asked = _arithmetic(plan, dtype, cache_dtype)
    plan.matrices = [_device_form(shape, _FLOATS[asked]) for shape in plan.matrices]
    kind = DTYPES[_FLOATS[asked]]
    weights = DeviceWeights(plan.spec, plan.shapes(), kind, accelerator.device(accelerator.current_device()))

    def report(done: int, total: int) -> None:
        if check is not None:
            check()
        if progress is not None:
            progress(done, total)

    # Only what fills weights is asked of a model by the plan.
    plan.fill(cast("_llm.DecoderModel", weights), report)
    weights.finish()
    limit = cache_limit
    if limit == 0:
        known = accelerator.has(Capability.MEMORY_SIZE)
        limit = int(accelerator.available_memory() * _SHARE_OF_MEMORY) if known else _UNKNOWN_MEMORY
        if torch.empty(0, device=weights.device).is_cpu:  # the ranks of a host share its memory
            limit //= on_host
    precise = torch.float64 if accelerator.has(Capability.FP64) else torch.float32
    ranks = None
    if size > 1 and group is not None:
        ranks = TensorRanks(group, [shard(plan.whole, each, size).vocab_count for each in range(size)])
    executor = DeviceExecutor(plan.spec, weights, kind, limit, precise, ranks)
    return NativeModel(
        _llm.ExternalModel(plan.spec, executor),
        plan.spec,
        plan.whole,
        checkpoint.config,
        checkpoint.generation_config,
        None if dtype == "auto" else dtype,
        plan.forms(),
        rank,
        size,
    )


def _arithmetic(plan: Plan, dtype: str | None, cache_dtype: str | None) -> str:
    """What everything but quantised weights is in.

    Raises:
        UsageError: keys and values are asked for in what they cannot be in.
    """
    formats = {shape.format for shape in plan.matrices if not _in_float32(shape)}
    if not formats & QUANTISED:
        if dtype is not None and dtype in _FLOATS:
            own = dtype
        else:
            names = [name for name, kind in _FLOATS.items() if formats == {kind}]
            own = names[0] if names else "bf16"
        if cache_dtype in (None, own):
            return own
        raise UsageError(f"kv_cache={cache_dtype!r}: runtime='device' keeps keys and values in the model's own {own}")
    accelerator = get_accelerator()
    has = {"bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported(), "fp32": True}
    if cache_dtype is None:
        return next(name for name, there in has.items() if there)
    if not has.get(cache_dtype):
        usable = ", ".join(name for name, there in has.items() if there)
        raise UsageError(f"kv_cache={cache_dtype!r}: runtime='device' has {usable} here, with quantised weights")
    return cache_dtype


def _in_float32(shape: MatrixShape) -> bool:
    return shape.name.rsplit(".", 1)[-1] in ("router", "shared_gate")


def _device_form(shape: MatrixShape, own: str) -> MatrixShape:
    """A matrix in a form that is there: whole numbers of 4 and 8 bits, and floats of one kind. No value is rounded."""
    if shape.format in ("i4", "i8") or _in_float32(shape):
        return shape
    if shape.format not in QUANTISED:
        return replace(shape, format=own)
    minimum = shape.minimum or FORMATS[shape.format].minima == "always"
    return replace(shape, format="i8", minimum=minimum)
