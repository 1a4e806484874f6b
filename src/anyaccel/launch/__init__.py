# SPDX-License-Identifier: Apache-2.0
"""Starts workers bound to their cores and memory, and ends every one of them. Never imports torch.

Names load on first use, as `anyaccel generate` needs the devices only.
"""

from __future__ import annotations

from anyaccel._lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.launch.local.launcher import check_script, launch_local, run
    from anyaccel.launch.plan.options import LaunchOptions
    from anyaccel.launch.plan.plan import LaunchPlan, RankBinding
    from anyaccel.launch.plan.planning import make_plan

__getattr__, __dir__ = lazy(
    __name__,
    {
        "LaunchOptions": "anyaccel.launch.plan.options",
        "LaunchPlan": "anyaccel.launch.plan.plan",
        "RankBinding": "anyaccel.launch.plan.plan",
        "check_script": "anyaccel.launch.local.launcher",
        "launch_local": "anyaccel.launch.local.launcher",
        "make_plan": "anyaccel.launch.plan.planning",
        "run": "anyaccel.launch.local.launcher",
    },
)

__all__ = ["LaunchOptions", "LaunchPlan", "RankBinding", "check_script", "launch_local", "make_plan", "run"]
