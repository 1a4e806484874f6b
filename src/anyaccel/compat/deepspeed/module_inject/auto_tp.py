# SPDX-License-Identifier: Apache-2.0
"""deepspeed.module_inject.auto_tp: which linears of a model are summed over ranks. The plan is init_inference's."""

from __future__ import annotations

from typing import Any

from torch import nn

from anyaccel.errors import ModelError
from anyaccel.inference.generic.tp.plan import TensorParallelPlan, make_plan

from .._cover import cover, refuse

__all__ = ["AutoTP"]


class AutoTP:
    """Asks about a model; `init_inference(model, tensor_parallel={"tp_size": n})` divides it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise refuse(
            "module_inject.auto_tp.AutoTP(...)", "init_inference(model, tensor_parallel={'tp_size': n}) divides a model"
        )

    @staticmethod
    def supported(model: nn.Module) -> bool:
        """Whether init_inference can divide the model."""
        try:
            _plan(model)
        except ModelError:
            return False
        return True

    @staticmethod
    def get_module_list(model: nn.Module) -> list[nn.Module]:
        """The first layer of each list of layers."""
        return [module[0] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]

    @staticmethod
    def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], list[str]]]:
        """(class of a layer, names in it of the linears whose outputs are summed over the ranks).

        Raises:
            ModelError: the model cannot be divided.
        """
        layers = [
            (name, child)
            for prefix, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
            for name, child in ((f"{prefix}.{short}", child) for short, child in module.named_children())
        ]
        found: dict[type[nn.Module], set[str]] = {}
        for linear in _plan(model).row_parallel:
            inside = [(name, child) for name, child in layers if linear.startswith(f"{name}.")]
            if inside:
                name, child = min(inside, key=lambda item: len(item[0]))
                found.setdefault(type(child), set()).add(linear.removeprefix(f"{name}."))
        return [(kind, sorted(names)) for kind, names in found.items()]


def _plan(model: nn.Module) -> TensorParallelPlan:
    plan = make_plan(model, rank=0, size=2)
    if not plan.row_parallel:
        raise ModelError(f"{type(model).__name__} cannot be divided: {next(iter(plan.whole.values()))}")
    return plan


cover(globals())
