# SPDX-License-Identifier: Apache-2.0
"""deepspeed.inference."""

from __future__ import annotations

from .._cover import cover

cover(
    globals(),
    {
        "InferenceEngine": "anyaccel.inference:InferenceEngine",
    },
    ("engine",),
)
