# SPDX-License-Identifier: Apache-2.0
"""pdsh: one agent a host, through ssh.

pdsh joins the words of the command with spaces, replaces ``%n`` by the number of the host (in the order of `-w`), and
gives the result to the login shell of each host.

pdsh waits for all hosts when one fails, and leaves the remote side alone when it is ended: agents go by the connection
on which they have called the launcher back. Its contact, with the secret word of the job, is an argument here, which
others on these hosts can read with `ps`: they could take the place of an agent and be sent the variables that travel.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import check_hosts, ssh_options, start_environment

_NUMBER = "%n"  # pdsh's own word for the number of the host


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of pdsh.

    -S: the exit code is the largest of all hosts'.
    -R ssh: in Debian it is rsh otherwise.
    -b: one Ctrl-C ends it, instead of two within a second.
    -N: lines come as they are; `--rank-prefix` says whose they are.
    -f: all hosts at once; the job would wait for those that are not started.
    """
    check_hosts(job, "pdsh", users=True, ipv6=True)
    command = ["pdsh", "-S", "-R", "ssh", "-b", "-N", "-f", str(len(job.hosts))]
    if job.verbose:
        command.append("-d")
    command += ["-w", ",".join(host.name for host in job.hosts), *job.launcher_args, "exec"]
    variables = start_environment(job)
    if variables:
        command += ["env", *(_word(f"{name}={value}") for name, value in variables.items())]
    return [*command, *(word if word == _NUMBER else _word(word) for word in job.program)]


def _word(text: str) -> str:
    """A word as the login shell of a host has to see it, which pdsh is to leave as it is."""
    return shlex.quote(text).replace("%", "%%")


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job, and what pdsh tells ssh."""
    options = [environ.get("PDSH_SSH_ARGS_APPEND", ""), *ssh_options(job)]
    return {"PDSH_SSH_ARGS_APPEND": " ".join(filter(None, options))}
