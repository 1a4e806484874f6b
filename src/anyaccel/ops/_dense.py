# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor has memory from which native code can read its values."""

from __future__ import annotations

import torch

_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # tensor classes that do not redefine what operations do


def why_no_memory(tensor: torch.Tensor) -> str:
    """Why the values of a tensor are not at its address, for messages; "" if they are."""
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        return f"a {type(tensor).__name__}: give the tensor inside it"
    if tensor.device.type == "meta" or tensor.is_nested or tensor.layout != torch.strided:
        return "nested" if tensor.is_nested else "meta" if tensor.device.type == "meta" else str(tensor.layout)
    if tensor._is_zerotensor():
        return "a zero tensor without memory: clone it"
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    there = tensor.untyped_storage()
    if tensor.numel() and there.nbytes() < (last + 1) * tensor.element_size():
        return f"without its memory: its storage has {there.nbytes()} bytes"
    return ""
