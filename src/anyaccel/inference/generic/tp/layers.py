# SPDX-License-Identifier: Apache-2.0
"""The module that replaces a row-parallel linear."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from anyaccel import comm


class RowParallelLinear(nn.Module):
    """A linear whose input features are divided among the ranks of a group.

    Args:
        weight_OI: [out_features, this rank's in_features].
        bias_O: [out_features] or None; added once, after the sum.
        group: ranks that hold the other input features; None: the default group.
    """

    def __init__(self, weight_OI: nn.Parameter, bias_O: nn.Parameter | None, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = weight_OI
        self.bias = bias_O
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's in_features] -> [..., out_features], the same on every rank."""
        y = nn.functional.linear(x, self.weight)
        comm.inference_all_reduce(y, group=self._group)
        return y if self.bias is None else y.add_(self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, bias={self.bias is not None}"
