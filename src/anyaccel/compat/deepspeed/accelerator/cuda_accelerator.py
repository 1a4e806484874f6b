# SPDX-License-Identifier: Apache-2.0
"""deepspeed.accelerator.cuda_accelerator."""

from __future__ import annotations

from anyaccel.accelerator.backends.cuda import CudaAccelerator as CUDA_Accelerator

from .._cover import cover
from .abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CUDA_Accelerator", "DeepSpeedAccelerator"]

cover(globals())
