# SPDX-License-Identifier: Apache-2.0
"""Starts workers bound to their cores and memory, and ends every one of them. Never imports torch."""

from anyaccel.launch.launcher import check_script, launch_local, make_plan, run
from anyaccel.launch.options import LaunchOptions
from anyaccel.launch.plan import LaunchPlan, RankBinding

__all__ = ["LaunchOptions", "LaunchPlan", "RankBinding", "check_script", "launch_local", "make_plan", "run"]
