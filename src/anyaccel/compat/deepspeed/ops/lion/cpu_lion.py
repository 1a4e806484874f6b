# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.lion.cpu_lion."""

from __future__ import annotations

from typing import Any

from anyaccel.ops.lion import CPULion

from ..._cover import cover

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(CPULion):
    """`anyaccel.ops.lion.CPULion`, whose first argument has DeepSpeed's name."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay, fp32_optimizer_states)


cover(globals())
