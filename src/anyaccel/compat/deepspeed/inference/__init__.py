# SPDX-License-Identifier: Apache-2.0
"""deepspeed.inference."""

from __future__ import annotations

from .._cover import cover

cover(
    globals(),
    {
        "DeepSpeedInferenceConfig": "anyaccel.inference:InferenceConfig",
        "InferenceEngine": "anyaccel.inference:InferenceEngine",
    },
    ("config", "engine"),
)
