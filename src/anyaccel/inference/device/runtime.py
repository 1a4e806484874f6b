# SPDX-License-Identifier: Apache-2.0
"""From a model's files, or a model in memory, to a decoder on the accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from anyaccel import _llm
from anyaccel.accelerator import Capability, get_accelerator
from anyaccel.errors import UsageError
from anyaccel.inference.device.executor import DeviceExecutor
from anyaccel.inference.device.ranks import TensorRanks
from anyaccel.inference.device.weights import DTYPES, DeviceWeights
from anyaccel.inference.native.formats import ALWAYS_FLOAT
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.native.runtime import (
    ALONE,
    LOGGED,
    SHARE_OF_MEMORY,
    Callbacks,
    NativeModel,
    RankPlace,
    make_plan,
    native_model,
    open_checkpoint,
)
from anyaccel.inference.native.shard import shard
from anyaccel.inference.options import DEFAULTS, ModelOptions
from anyaccel.inference.spec.decoder import MatrixShape
from anyaccel.inference.spec.packed_formats import FORMATS, QUANTISED

# Precisions and how `_llm` calls them.
_FLOATS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}
_UNKNOWN_MEMORY = 1 << 62


def load_device(
    model: Any,
    options: ModelOptions = DEFAULTS,
    place: RankPlace = ALONE,
    callbacks: Callbacks = LOGGED,
    config: Mapping[str, Any] | None = None,
) -> NativeModel:
    """Make the decoder of a model on `get_accelerator()`: `load_native` with another executor.

    Weights go to the device as they are read; the host has a few megabytes of them at a time. Keys and values are in
    the precision of float weights. With quantised weights `kv_cache` is the precision of all arithmetic; "auto": bf16,
    or what the device has of fp16 and fp32.

    Args:
        place: of several ranks it has their process group.

    Raises:
        Unsupported, ModelError, UsageError: see `load_native`.
    """
    if options.ranks > 1 and place.group is None:
        raise UsageError(f"tp={options.tp}: the ranks that share a model on a device need a process group")
    accelerator = get_accelerator()
    checkpoint = open_checkpoint(model, config, lora=options.lora)
    callbacks.raise_if_cancelled()
    plan = make_plan(checkpoint, options, place)
    arithmetic = _arithmetic(plan, options)
    plan.matrices = [_device_form(shape, _FLOATS[arithmetic]) for shape in plan.matrices]
    kind = DTYPES[_FLOATS[arithmetic]]
    weights = DeviceWeights(plan.spec, plan.shapes(), kind, accelerator.device(accelerator.current_device()))
    # Only what fills weights is asked of a model by the plan.
    plan.fill(cast("_llm.DecoderModel", weights), callbacks.report)
    weights.finish()
    limit = options.cache_bytes
    if limit == 0:
        known = accelerator.has(Capability.MEMORY_SIZE)
        limit = int(accelerator.available_memory() * SHARE_OF_MEMORY) if known else _UNKNOWN_MEMORY
        if torch.empty(0, device=weights.device).is_cpu:  # the ranks of a host share its memory
            limit //= place.on_host or options.ranks
    precise = torch.float64 if accelerator.has(Capability.FP64) else torch.float32
    ranks = None
    if place.group is not None:
        counts = [shard(plan.whole, rank, options.tp).vocab_count for rank in range(options.tp)]
        ranks = TensorRanks(place.group, counts)
    executor = DeviceExecutor(plan.spec, weights, kind, limit, precise, ranks)
    return native_model(_llm.ExternalModel(plan.spec, executor), plan, checkpoint, options, place, "device")


def _arithmetic(plan: Plan, options: ModelOptions) -> str:
    """What everything but quantised weights is in.

    Raises:
        UsageError: keys and values are asked for in what they cannot be in.
    """
    asked = options.kv_cache
    formats = {shape.format for shape in plan.matrices if not _in_float32(shape)}
    if not formats & QUANTISED:
        own = options.dtype
        if own not in _FLOATS:
            names = [name for name, kind in _FLOATS.items() if formats == {kind}]
            own = names[0] if names else "bf16"
        if asked in ("auto", own):
            return own
        raise UsageError(f"kv_cache={asked!r}: runtime='device' keeps keys and values in the model's own {own}")
    accelerator = get_accelerator()
    has = {"bf16": accelerator.is_bf16_supported(), "fp16": accelerator.is_fp16_supported(), "fp32": True}
    usable = [name for name, there in has.items() if there]
    if asked == "auto":
        return usable[0]
    if asked not in usable:
        raise UsageError(f"kv_cache={asked!r}: runtime='device' has {', '.join(usable)} here, with quantised weights")
    return asked


def _in_float32(shape: MatrixShape) -> bool:
    return shape.name.rsplit(".", 1)[-1] in ALWAYS_FLOAT


def _device_form(shape: MatrixShape, own: str) -> MatrixShape:
    """A matrix in a form that is there: whole numbers of 4 and 8 bits, and floats of one kind. No value is rounded."""
    if shape.format in ("i4", "i8") or _in_float32(shape):
        return shape
    if shape.format not in QUANTISED:
        return replace(shape, format=own)
    minimum = shape.minimum or FORMATS[shape.format].minima == "always"
    return replace(shape, format="i8", minimum=minimum)
