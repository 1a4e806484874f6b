# SPDX-License-Identifier: Apache-2.0
"""Lion on parameters in host memory, and on those of devices."""

from __future__ import annotations

from typing import Any, ClassVar

import anyaccel._needs_torch  # noqa: F401

# isort: split
import torch

from anyaccel.ops._checks import check_range, read_betas
from anyaccel.ops._optimizer import AnyDevice, HostOptimizer, Params
from anyaccel.ops.builders.host import CPULionBuilder
from anyaccel.ops.builders.in_tree import InTreeBuilder

__all__ = ["CPULion", "FusedLion"]


class CPULion(HostOptimizer):
    """Lion (Chen et al., https://arxiv.org/abs/2302.06675) in native code; arguments are those of DeepSpeedCPULion."""

    MOMENTS: ClassVar[tuple[str, ...]] = ("exp_avg",)
    BUILDER: ClassVar[type[InTreeBuilder]] = CPULionBuilder

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
        *,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        """Args:
            params: parameters or parameter groups; float32, bfloat16 or float16.
            betas: the paper uses (0.9, 0.99); the default is DeepSpeed's.
            fp32_optimizer_states: False keeps the state of a float32 parameter in float32, that of others in bfloat16.
            state_dtype: of the momentum, float32 (default) or bfloat16.
            master_weights: as in CPUAdam.

        Raises:
            UsageError: an argument or a parameter is one that the kernels cannot take.
        """
        check_range(type(self).__name__, lr=lr, weight_decay=weight_decay)
        read_betas(type(self).__name__, betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, state_dtype, master_weights, fp32_optimizer_states)

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = read_betas(type(self).__name__, self._option(group, "betas"))
        return self._number(group, "lr"), beta1, beta2, self._number(group, "weight_decay")


class FusedLion(AnyDevice, CPULion):
    """Lion in few calls: torch's operations on lists of tensors on a device, ours on the CPU.

    Arguments are those of DeepSpeed's FusedLion. On a device, the moment is in the parameters' dtype.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """Args: as of CPULion; set_grad_none: what zero_grad() does."""
        self._set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay)

    @torch.no_grad()
    def _step_on_device(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        states = self._states_for(group, params)
        lr, beta1, beta2, weight_decay = self._hyper(group)
        moments = [state["exp_avg"] for state in states]
        grads = [param.grad.to(param.dtype) for param in params if param.grad is not None]
        directions = torch._foreach_mul(moments, beta1)
        torch._foreach_add_(directions, grads, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, directions, alpha=-lr)
        torch._foreach_mul_(moments, beta2)
        torch._foreach_add_(moments, grads, alpha=1 - beta2)
        torch._foreach_add_([state["step"] for state in states], 1)
