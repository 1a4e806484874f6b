# SPDX-License-Identifier: Apache-2.0
"""Lion on parameters in host memory."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anyaccel.ops._native_step import NativeStep
from anyaccel.ops._optimizer import HostOptimizer, Params, check_range
from anyaccel.ops.builders.host import CPULionBuilder

__all__ = ["CPULion"]


class CPULion(HostOptimizer):
    """Lion (Chen et al., https://arxiv.org/abs/2302.06675) in native code; arguments are those of DeepSpeedCPULion."""

    MOMENTS: ClassVar[tuple[str, ...]] = ("exp_avg",)

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
            fp32_optimizer_states: False is ``state_dtype=torch.bfloat16``.
            state_dtype: of the momentum, float32 (default) or bfloat16.
            master_weights: as in CPUAdam.

        Raises:
            UsageError: an argument or a parameter is one that the kernels cannot take.
        """
        check_range(type(self).__name__, lr=float(lr), weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        if state_dtype is None:
            state_dtype = torch.float32 if fp32_optimizer_states else torch.bfloat16
        super().__init__(params, defaults, state_dtype, master_weights)

    def _load(self) -> NativeStep:
        step: NativeStep = CPULionBuilder().load().native_step
        return step

    def _hyper(self, group: dict[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return float(group["lr"]), beta1, beta2, group["weight_decay"]
