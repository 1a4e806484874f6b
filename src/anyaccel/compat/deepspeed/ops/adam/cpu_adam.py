# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.adam.cpu_adam."""

from __future__ import annotations

from typing import Any

from anyaccel.ops.adam import CPUAdam

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


cover(globals())
