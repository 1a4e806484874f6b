# SPDX-License-Identifier: Apache-2.0
"""deepspeed.utils: the logger, core lists, OnDevice."""

from __future__ import annotations

from .._cover import cover

cover(
    globals(),
    {
        "OnDevice": ".utils.init_on_device:OnDevice",
        "get_accelerator": "anyaccel.accelerator:get_accelerator",
        "get_numactl_cmd": ".utils.numa:get_numactl_cmd",
        "instrument_w_nvtx": ".utils.nvtx:instrument_w_nvtx",
        "log_dist": ".utils.logging:log_dist",
        "log_dist_once": ".utils.logging:log_dist_once",
        "logger": ".utils.logging:logger",
        "set_log_level_from_string": ".utils.logging:set_log_level_from_string",
    },
    ("init_on_device", "logging", "numa", "nvtx", "pin_memory"),
)
