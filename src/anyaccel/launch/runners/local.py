# SPDX-License-Identifier: Apache-2.0
"""Workers of this machine, started by the launcher itself."""

from __future__ import annotations

import sys

from anyaccel.launch.options import LaunchOptions
from anyaccel.launch.plan import RankBinding


def build_command(options: LaunchOptions, binding: RankBinding) -> list[str]:
    """The argument vector of one worker. As `torchrun` and `deepspeed` do, Python runs unbuffered (`-u`)."""
    command = [] if options.no_python else [sys.executable or "python3", "-u"]
    if options.module:
        command.append("-m")
    command.append(options.script)
    if options.local_rank_argument:
        command.append(f"--local_rank={binding.local_rank}")
    return [*command, *options.script_args]
