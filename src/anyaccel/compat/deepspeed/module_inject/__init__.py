# SPDX-License-Identifier: Apache-2.0
"""deepspeed.module_inject: tensor parallelism of unmodified models, as far as others call it."""

from __future__ import annotations

from .._cover import cover

cover(
    globals(),
    {
        "LinearAllreduce": ".module_inject.layers:LinearAllreduce",
        "LinearLayer": ".module_inject.layers:LinearLayer",
        "set_autotp_mode": ".module_inject.layers:set_autotp_mode",
    },
    ("auto_tp", "layers"),
)
