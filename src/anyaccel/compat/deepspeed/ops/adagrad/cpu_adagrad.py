# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.adagrad.cpu_adagrad."""

from __future__ import annotations

from typing import Any

from anyaccel.ops.adagrad import CPUAdagrad

from ..._cover import cover

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(CPUAdagrad):
    """`anyaccel.ops.adagrad.CPUAdagrad`, whose first argument has DeepSpeed's name."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, eps, weight_decay, amsgrad, fp32_optimizer_states)


cover(globals())
