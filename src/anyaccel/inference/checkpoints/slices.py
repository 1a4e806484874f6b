# SPDX-License-Identifier: Apache-2.0
"""The shard of a tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slice:
    """The shard of a tensor that a rank holds: these ranges along `dim`, concatenated."""

    dim: int
    ranges: tuple[range, ...]

    def __len__(self) -> int:
        return sum(map(len, self.ranges))


def view(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """`part` of `tensor`, without a copy if it is one range."""
    pieces = [tensor.narrow(part.dim, piece.start, len(piece)) for piece in part.ranges]
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]


def take(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """A dense copy of `part` of `tensor`."""
    found = view(tensor, part)
    return found if len(part.ranges) > 1 else found.clone(memory_format=torch.contiguous_format)
