# SPDX-License-Identifier: Apache-2.0
"""deepspeed.module_inject.layers: the two linears of tensor-parallel inference."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from anyaccel.inference.generic.tp.layers import RowParallelLinear
from anyaccel.inference.spec.partition import split_features

from .._cover import cover, refuse

__all__ = ["LinearAllreduce", "LinearLayer", "is_autotp_training_mode", "set_autotp_mode"]


def set_autotp_mode(training: bool = False) -> None:
    """Refuses tensor-parallel training."""
    if training:
        raise refuse("set_autotp_mode(training=True)", "use torch.distributed.tensor.parallel")


def is_autotp_training_mode() -> bool:
    """False."""
    return False


def _part(features: int, group: dist.ProcessGroup | None) -> slice:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return slice(None)
    own = split_features(features, dist.get_world_size(group))[dist.get_rank(group)]
    return slice(own.start, own.stop)


class LinearAllreduce(RowParallelLinear):
    """This rank's input features of a linear; outputs are summed over the group.

    Args:
        module: the whole linear, the same on every rank.
        mp_group: the group; None for all ranks.
    """

    def __init__(self, module: nn.Linear, mp_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        _check(kwargs)
        weight = module.weight.detach()[:, _part(module.in_features, mp_group)].contiguous()
        super().__init__(nn.Parameter(weight, requires_grad=False), module.bias, mp_group)
        self._alone = not dist.is_initialized()

    def forward(self, x: Any) -> Any:
        """[..., this rank's in_features] -> [..., out_features], the same on every rank."""
        return nn.functional.linear(x, self.weight, self.bias) if self._alone else super().forward(x)


class LinearLayer(nn.Linear):
    """This rank's output features of a linear.

    Args:
        module: the whole linear, the same on every rank.
        mp_group: the group; None for all ranks.
        skip_partition: the linear has been divided already.
    """

    def __init__(
        self,
        module: nn.Linear,
        mp_group: dist.ProcessGroup | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        _check({**kwargs, "gather_output": gather_output})
        own = slice(None) if skip_partition else _part(module.out_features, mp_group)
        weight = module.weight.detach()[own].contiguous()
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if module.bias is not None:
            self.bias = nn.Parameter(module.bias.detach()[own].contiguous(), requires_grad=False)


def _check(options: dict[str, Any]) -> None:
    # `name` says where the linear is in its model.
    given = [name for name, value in options.items() if value and name != "name"]
    if given:
        raise refuse(f"module_inject.layers({given[0]}=...)", "init_inference chooses the layers of a model by itself")


cover(globals())
