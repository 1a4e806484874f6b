# SPDX-License-Identifier: Apache-2.0
"""Asynchronous file I/O of tensors: `aio_handle` and functions, with DeepSpeed's names.

What DeepSpeed refuses works here: any offset, size, dtype and memory, strided tensors and those of an accelerator, and
file systems without O_DIRECT. Errors are `AioError`. docs/aio.md says how it works.
"""

from __future__ import annotations

import anyaccel._needs_torch  # noqa: F401

# isort: split
import torch

from anyaccel.errors import AioError
from anyaccel.ops.aio.handle import aio_handle
from anyaccel.ops.aio.native import bind
from anyaccel.ops.aio.requests import PathLike, copy_into

__all__ = ["AioError", "aio_handle", "aio_read", "aio_write", "bind", "deepspeed_memcpy"]


def aio_read(
    buffer: torch.Tensor,
    filename: PathLike,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """aio_handle.read() with a handle of its own."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events, 1).read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: PathLike,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """aio_handle.write() with a handle of its own."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events, 1).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copy `src` to `dest`. Returns 0."""
    copy_into(dest, src)
    return 0
