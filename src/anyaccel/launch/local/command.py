# SPDX-License-Identifier: Apache-2.0
"""The argument vector of a worker."""

from __future__ import annotations

import sys

from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.launch.plan.plan import RankBinding

# Begins what an agent, or the shell that starts it, says of its own errors; other lines are ssh's or a login script's.
OUR_ERROR = "anyaccel: error: "
# A named pipe is refused, as bash would wait until somebody opens it for writing.
_SOURCED = (
    f'if [ -p "$0" ]; then echo "{OUR_ERROR}--venv_script $0 is a pipe; give a file" >&2; exit 2; fi; '
    # The script may end the shell by itself.
    f"""trap 'echo "{OUR_ERROR}--venv_script $0 failed with exit code $?" >&2' EXIT; """
    '. "$0" || exit; trap - EXIT; exec "$@"'
)


def worker_command(options: LaunchOptions, binding: RankBinding) -> list[str]:
    """The whole argument vector of one rank."""
    rank = [f"--local_rank={binding.local_rank}"] if options.local_rank_argument else []
    return [*program(options), *rank, *options.script_args]


def program(options: LaunchOptions) -> list[str]:
    """The argument vector up to the script. As `torchrun` and `deepspeed` do, Python runs unbuffered (`-u`)."""
    command = [] if options.no_python else ["python" if options.venv_script else sys.executable or "python3", "-u"]
    if options.module:
        command.append("-m")
    return [*in_venv(options.venv_script), *command, options.script]


def in_venv(script: str | None) -> list[str]:
    """The words before a command that make it run with `script` sourced, in bash, which conda's scripts need.

    bash would look for a name without a folder in PATH, and take one that begins with a dash for an option.
    """
    if not script:
        return []
    return ["bash", "-c", _SOURCED, script if script.startswith("/") else f"./{script}"]
