# SPDX-License-Identifier: Apache-2.0
"""Adagrad on parameters in host memory."""

from __future__ import annotations

from itertools import compress
from typing import Any, ClassVar

import anyaccel._needs_torch  # noqa: F401

# isort: split
import torch

from anyaccel.errors import UsageError
from anyaccel.ops._checks import check_range
from anyaccel.ops._native_step import TensorBatch
from anyaccel.ops._optimizer import MASTER, HostOptimizer, Params
from anyaccel.ops.builders.host import CPUAdagradBuilder
from anyaccel.ops.builders.in_tree import InTreeBuilder

__all__ = ["CPUAdagrad"]


class CPUAdagrad(HostOptimizer):
    """Adagrad in native code. Arguments are those of DeepSpeedCPUAdagrad, and torch's others by name.

    The results equal torch's to fp32 rounding. State is that of torch.optim.Adagrad. A gradient may be sparse (COO), as
    of an embedding with ``sparse=True``.
    """

    MOMENTS: ClassVar[tuple[str, ...]] = ("sum",)
    BUILDER: ClassVar[type[InTreeBuilder]] = CPUAdagradBuilder
    OWN_OPTIONS: ClassVar[tuple[str, ...]] = ("lr_decay", "initial_accumulator_value", "amsgrad")

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        """Args:
            params: parameters or parameter groups; float32, bfloat16 or float16.
            amsgrad: must be False.
            fp32_optimizer_states: False keeps the state of a float32 parameter in float32, that of others in bfloat16.
            lr_decay: the learning rate is divided by ``1 + (step - 1) * lr_decay``.
            initial_accumulator_value: what the sum of squares starts with.
            state_dtype: of the sum, float32 (default) or bfloat16.
            master_weights: as in CPUAdam.

        Raises:
            UsageError: an argument or a parameter is one that the kernels cannot take.
        """
        name = type(self).__name__
        check_range(name, lr=lr, eps=eps, weight_decay=weight_decay, lr_decay=lr_decay)
        check_range(name, initial_accumulator_value=initial_accumulator_value)
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults, state_dtype, master_weights, fp32_optimizer_states)

    def _initial_state(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super()._initial_state(param, state, group)
        state["sum"].fill_(self._number(group, "initial_accumulator_value"))

    def _step_params(self, index: int, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        dense = [grad.layout is torch.strided for grad in grads]
        for param, grad, is_dense in zip(params, grads, dense, strict=True):
            if not is_dense:
                self._step_sparse(self.param_groups[index], param, grad)
        if not all(dense):
            params = list(compress(params, dense))
            grads = list(compress(grads, dense))
        if params:
            super()._step_params(index, params, grads)

    @torch.no_grad()
    def _step_sparse(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        """Update the rows (of an embedding) that the gradient has; as in DeepSpeed, only these get weight decay."""
        if grad.layout is not torch.sparse_coo:
            raise UsageError(
                f"{type(self).__name__} takes dense gradients and sparse_coo ones, and one is {grad.layout}"
            )
        self._check_group(group)
        state = self._prepared_state(param, group)
        self._update_masters([param])
        grad = grad.coalesce()
        at, target = tuple(grad.indices()), state.get(MASTER, param)
        rows, total = target[at].contiguous(), state["sum"][at].contiguous()
        batch = TensorBatch([rows], [grad.values().contiguous()], [[total]], [state["step"]], None)
        self._native.run(batch, *self._hyper(group))
        state["sum"][at] = total
        for tensor in {
            id(each): each for each in (target, param, self._copies.get(param)) if each is not None
        }.values():
            tensor[at] = rows.to(tensor.dtype)
        self._remember_versions([param])

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        names = "lr", "lr_decay", "eps", "weight_decay"
        return tuple(self._number(group, name) for name in names)

    def _converted(self, param: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        if "sum" not in saved and "exp_avg_sq" in saved:  # DeepSpeed's name for it
            saved = {**saved, "sum": saved["exp_avg_sq"]}
            del saved["exp_avg_sq"]
        return super()._converted(param, saved)
