# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's names for anyaccel. Scripts import it as `deepspeed` after `anyaccel compat install`.

docs/deepspeed-names.md lists what is covered; everything else raises an error that names it. Names load on first use.
"""

from __future__ import annotations

from anyaccel._version import __version__ as _anyaccel_version

from ._cover import cover, install_finder

# The version of DeepSpeed whose names and signatures these are: scripts compare it.
INTERFACE = "0.19.8"
__version__ = version = f"{INTERFACE}+anyaccel.{_anyaccel_version}"
__version_major__, __version_minor__, __version_patch__ = map(int, INTERFACE.split("."))
__git_hash__ = git_hash = "[none]"
__git_branch__ = git_branch = "[none]"

install_finder()
cover(
    globals(),
    {
        "InferenceEngine": "anyaccel.inference:InferenceEngine",
        "OnDevice": ".utils.init_on_device:OnDevice",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": ".constants:TORCH_DISTRIBUTED_DEFAULT_PORT",
        "add_config_arguments": "._arguments:add_config_arguments",
        "default_inference_config": "._inference:default_inference_config",
        "get_accelerator": "anyaccel.accelerator:get_accelerator",
        "init_distributed": ".comm.comm:init_distributed",
        "init_inference": "._inference:init_inference",
        "log_dist": ".utils.logging:log_dist",
        "logger": ".utils.logging:logger",
        "set_autotp_mode": ".module_inject.layers:set_autotp_mode",
    },
    ("accelerator", "comm", "git_version_info", "inference", "launcher", "module_inject", "ops", "runtime", "utils"),
)
