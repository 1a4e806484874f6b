# SPDX-License-Identifier: Apache-2.0
"""deepspeed.inference.engine: what init_inference returns."""

from __future__ import annotations

from anyaccel.inference import InferenceEngine

from .._cover import cover

__all__ = ["InferenceEngine"]

cover(globals())
