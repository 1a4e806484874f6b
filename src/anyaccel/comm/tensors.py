# SPDX-License-Identifier: Apache-2.0
"""Brings tensors into the form that native code needs: dense memory on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.errors import UsageError

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_BARE = (torch.Tensor, torch.nn.Parameter)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that has the memory of this one, detached from autograd.

    A result of torch's functional collectives is waited for first. Tensor subclasses that redefine operations are
    refused: collectives bypass torch's dispatcher, and the address of such a tensor is not that of its values.

    Raises:
        UsageError: the tensor is not on the CPU, or has no memory of its own.
    """
    return tensor.detach() if _is_bare(tensor) else _unwrapped(tensor)


def _is_bare(tensor: torch.Tensor) -> bool:
    dense = type(tensor) in _BARE and tensor.is_cpu and tensor.layout == torch.strided
    return dense and not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    # Loaded here: with plain tensors nobody needs it, and it takes a second.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return unwrap(tensor.trigger_wait())  # type: ignore[no-untyped-call]
    if _has_dispatch(tensor):
        raise UsageError(
            f"collectives work on tensors with memory of their own; this one is a {type(tensor).__name__}: give them "
            f"the tensor inside it{' (to_local())' if hasattr(tensor, 'to_local') else ''}"
        )
    if not tensor.is_cpu:
        raise UsageError(f"collectives of this backend work on CPU tensors; this one is on {tensor.device}")
    kind = ""
    if tensor.is_nested:
        kind = "nested: give its values"
    elif tensor.is_quantized:
        kind = f"quantised ({tensor.dtype}): give its int_repr()"
    elif tensor.layout != torch.strided:
        kind = f"{tensor.layout}" + (": only all_reduce takes it" if tensor.layout == torch.sparse_coo else "")
    elif tensor._is_zerotensor():
        kind = "a zero tensor without memory: clone it"
    if kind:
        raise UsageError(f"collectives work on dense and strided tensors; this one is {kind}")
    return tensor.detach().as_subclass(torch.Tensor)


def _has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether its class redefines operations; it then has no memory of its own."""
    return type(tensor).__torch_dispatch__ is not _NO_DISPATCH


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether it is a COO tensor on the CPU."""
    return tensor.layout == torch.sparse_coo and tensor.is_cpu and not _has_dispatch(tensor)


def unwrap_each(tensors: Any) -> Any:
    """Apply `bare` to a tensor or to nested lists of them; plain and sparse tensors stay as they are."""
    if isinstance(tensors, torch.Tensor):
        return tensors if _is_bare(tensors) or is_sparse(tensors) else _unwrapped(tensors)
    if len(tensors) == 1 and type(tensors[0]) is torch.Tensor and _is_bare(tensors[0]):  # a fast path
        return tensors
    return [unwrap_each(each) for each in tensors]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds exactly the tensor's values, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as a plain, detached tensor, which shares its memory if possible."""
    tensor = unwrap(tensor)
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor, as a flat tensor of bytes."""
    # A tensor of one element is dense with any stride, which view() does not take.
    flat = tensor.as_strided((1,), (1,)) if tensor.numel() == 1 else tensor.reshape(-1)
    return flat.view(torch.uint8)


class Target:
    """Memory for an output: the tensor's own if it is plain, otherwise a buffer that `store` copies to the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = unwrap(tensor)
        plain = is_plain(self._tensor)
        self.memory = self._tensor if plain else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def store(self) -> None:
        """Copy the buffer, if there is one, to the tensor."""
        if self.memory is not self._tensor:
            self._tensor.copy_(self.memory)


class InPlaceTarget(Target):
    """A target whose memory already has the tensor's values, for operations in place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        if self.memory is not self._tensor:
            self.memory = values(self._tensor)


def same_dtype(tensors: list[torch.Tensor], what: str) -> None:
    """Raise UsageError unless all have one dtype."""
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise UsageError(f"{what} needs tensors of one dtype; got {', '.join(sorted(map(str, found)))}")
