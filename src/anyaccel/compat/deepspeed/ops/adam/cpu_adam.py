# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.adam.cpu_adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyaccel.errors import RollbackError
from anyaccel.ops._native_step import TensorBatch
from anyaccel.ops.adam import CPUAdam
from anyaccel.ops.builders.host import CPUAdamBuilder
from anyaccel.ops.optimizer_ops import AdamOp

from ..._cover import cover

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(CPUAdam):
    """`anyaccel.ops.adam.CPUAdam`, whose first argument has DeepSpeed's name."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode, fp32_optimizer_states
        )

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, with the state of `subgroup_id` instead of their own.

        Args:
            subgroup_id: key of the state, which the first call makes for the parameter that has a gradient then.
            closure: calculates the loss and the gradients again.

        Returns:
            What `closure` returned.
        """
        loss = _call(closure)
        for group, param, grad in self._with_gradients():
            state = self._prepared_state(param, group, subgroup_id)
            moments = [[state[name]] for name in self.MOMENTS]
            self._native.run(TensorBatch([param], [grad], moments, [state["step"]], None), *self._hyper(group))
            torch.autograd.graph.increment_version(param)
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last step_subgroup(), but for rounding; AdamW only.

        Raises:
            RollbackError: there was no such step.
            UsageError: it is not AdamW.
        """
        loss = _call(closure)
        state = self._state_of(sub_group_id) if sub_group_id in self.state else {}
        if not state:
            raise RollbackError(f"Cannot rollback optimizer state for sub_group_id {sub_group_id}: no step was made")
        op: AdamOp = CPUAdamBuilder().load()
        for group, param, grad in self._with_gradients():
            step = int(state["step"])
            if step <= 0:
                raise RollbackError(f"Cannot rollback sub_group_id {sub_group_id}: step count is {step}")
            op.create_adam(id(self), adamw_mode=group["decoupled_weight_decay"])
            moments = (state[name] for name in self.MOMENTS)
            try:
                op.adam_rollback(
                    id(self), step, float(group["lr"]), group["betas"][0], group["betas"][1], group["eps"],
                    group["weight_decay"], group["bias_correction"], param, grad, *moments,
                )  # fmt: skip
            finally:
                op.destroy_adam(id(self))
            state["step"] -= 1
            torch.autograd.graph.increment_version(param)
        return loss

    def _state_of(self, subgroup_id: int) -> dict[str, Any]:
        states: dict[Any, dict[str, Any]] = self.state
        return states[subgroup_id]

    def _with_gradients(self) -> list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        return [
            (group, param, param.grad)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]


def _call(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


cover(globals())
