# SPDX-License-Identifier: Apache-2.0
"""Which of the two executors of DecoderSpec loads a model. Torch is the device's alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyaccel.inference.config import InferenceConfig
    from anyaccel.inference.native.runtime import NativeModel


def load_decoder(
    model: Any,
    settings: InferenceConfig,
    rank: int,
    on_host: int,
    progress: Callable[[int, int], object] | None,
    executor: str,
    group: Any = None,
) -> NativeModel:
    """A rank's part of what an engine was asked for.

    Args:
        rank: among all of the model's; consecutive groups of `tp_size` are its stages.
        on_host: ranks that share this host's memory.
        executor: "native" or "device".
        group: of torch.distributed, with all of the model's ranks; None for one.

    Raises:
        Unsupported, ModelError, UsageError: see `load_native`.
    """
    size, stages = settings.tensor_parallel.tp_size, settings.pipeline_parallel.size
    stage, rank = divmod(rank, size)
    dtype = None if settings.dtype == "auto" else settings.dtype
    if executor == "device":
        from anyaccel.inference.device.runtime import load_device

        return load_device(
            model,
            dtype=dtype,
            group_size=settings.group_size,
            rank=rank,
            size=size,
            cache_dtype=None if settings.kv_cache == "auto" else settings.kv_cache,
            cache_limit=settings.cache_bytes,
            group=group,
            on_host=on_host,
            progress=progress,
            release=True,
        )
    from anyaccel.inference.native.runtime import load_native

    return load_native(
        model,
        dtype=dtype,
        group=settings.group_size,
        rank=rank,
        size=size,
        stage=stage,
        stages=stages,
        on_host=on_host,
        threads=settings.threads,
        cache_dtype=settings.cache_dtype,
        cache_limit=settings.cache_bytes,
        progress=progress,
        beside=size * stages == 1,
        release=True,
    )
