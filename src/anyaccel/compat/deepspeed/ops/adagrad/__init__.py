# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops.adagrad."""

from __future__ import annotations

from ..._cover import cover
from .cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]

cover(globals(), {}, ("cpu_adagrad",))
