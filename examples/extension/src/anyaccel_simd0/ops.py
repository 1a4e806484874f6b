# SPDX-License-Identifier: Apache-2.0
"""Ops of the device: all checks are here, since the kernel takes what it is given for an address."""

from __future__ import annotations

import ctypes
import functools

import torch

from anyaccel import get_accelerator


# [scale_add]
@functools.cache
def _library() -> ctypes.CDLL:
    library = get_accelerator().create_op_builder("FusedScaleAddBuilder").load()
    library.scale_add.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_size_t]
    library.scale_add.restype = None
    return library


def scale_add(x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """y += alpha * x in place, in one pass; no gradients.

    Args:
        x, y: float32, contiguous, of one shape, on the same simd device.

    Raises:
        ValueError: they are not.
    """
    for name, tensor in (("x", x), ("y", y)):
        if tensor.device.type != "simd" or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            seen = f"{tensor.dtype} on {tensor.device}" + ("" if tensor.is_contiguous() else ", not contiguous")
            raise ValueError(f"scale_add() takes contiguous float32 tensors on simd, {name} is {seen}")
    if x.device != y.device or x.shape != y.shape:
        raise ValueError(f"x and y differ: {tuple(x.shape)} on {x.device} and {tuple(y.shape)} on {y.device}")
    _library().scale_add(x.data_ptr(), y.data_ptr(), alpha, x.numel())
    torch.autograd.graph.increment_version(y)  # autograd must not use a y that was saved before
    return y


# [/scale_add]
