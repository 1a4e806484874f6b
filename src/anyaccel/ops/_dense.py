# SPDX-License-Identifier: Apache-2.0
"""Whether a tensor has memory from which native code can read its values."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # tensor classes that do not redefine what operations do


def any_distributed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one is a DTensor, of which this rank has a part."""
    module = sys.modules.get("torch.distributed.tensor")  # which takes long to import, and is there if one is
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


@torch.no_grad()
def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank has of each tensor: the local tensor of a DTensor, without a copy, or the tensor itself."""
    return [
        tensor.to_local() if any_distributed([tensor]) else tensor  # type: ignore[attr-defined]
        for tensor in tensors
    ]


@torch.no_grad()
def redistribute_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The tensor divided among the ranks as `other` is, if that is a DTensor; a collective call where it was not."""
    if not any_distributed([other]):
        return tensor
    mesh, placements = other.device_mesh, other.placements  # type: ignore[attr-defined]
    if not any_distributed([tensor]):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor, mesh, placements)
    if (tensor.device_mesh, tensor.placements) == (mesh, placements):  # type: ignore[attr-defined]
        return tensor
    return tensor.redistribute(mesh, placements)  # type: ignore[attr-defined,no-any-return]


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
