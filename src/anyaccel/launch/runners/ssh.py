# SPDX-License-Identifier: Apache-2.0
"""One agent per host, started by the system's OpenSSH. The default on several hosts.

An agent gets its task through its standard input (see `anyaccel.launch.cluster.channel`), not through the command
line: no shell sees an argument or a variable of the job, and their size has no limit.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from anyaccel.launch.local.command import in_venv

# Never prompt, as nobody could answer for a hundred hosts, and notice a dead connection within 4 to 6 s.
_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=2",
    "ClearAllForwardings=yes",
    "LogLevel=ERROR",
)


def agent_command(python: str) -> list[str]:
    """The command of the agent. `-P`: files in the current folder must not shadow modules."""
    return [python, "-P", "-m", "anyaccel.launch.cluster.node"]


def build_command(
    host: str,
    *,
    python: str,
    environment: Mapping[str, str],
    venv_script: str | None = None,
    ssh_port: int | None = None,
    launcher_args: Sequence[str] = (),
) -> list[str]:
    """The argument vector of ssh for one host.

    Args:
        host: as ssh knows it.
        python: interpreter that has anyaccel on that host.
        environment: variables that the start of Python there depends on; the others travel by themselves.
        venv_script: path from the root of a file to source before, which brings its own `python`.
        ssh_port: TCP port of sshd; None for what ssh itself uses.
        launcher_args: more options for ssh; they win over ours.
    """
    words = ["exec", *in_venv(venv_script), "env", *(f"{name}={value}" for name, value in environment.items())]
    line = shlex.join([*words, *agent_command("python" if venv_script else python)])
    # ssh uses the first value of an option, so the user's come first.
    command = ["ssh", "-T", "-x", *launcher_args]
    if ssh_port is not None:
        command += ["-p", str(ssh_port)]
    for option in _OPTIONS:
        command += ["-o", option]
    return [*command, "--", host, line]
