# SPDX-License-Identifier: Apache-2.0
"""deepspeed.inference.config: the options of init_inference; anyaccel's classes."""

from __future__ import annotations

from anyaccel.inference import InferenceConfig as DeepSpeedInferenceConfig
from anyaccel.inference import TensorParallelConfig as DeepSpeedTPConfig

from .._cover import cover

__all__ = ["DeepSpeedInferenceConfig", "DeepSpeedTPConfig"]

cover(globals())
