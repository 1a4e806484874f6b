# SPDX-License-Identifier: Apache-2.0
"""deepspeed.ops: optimizers, file I/O and op builders."""

from __future__ import annotations

from .._cover import cover

cover(
    globals(),
    {"__compatible_ops__": ".git_version_info:compatible_ops"},
    ("adagrad", "adam", "aio", "lion", "op_builder"),
)
