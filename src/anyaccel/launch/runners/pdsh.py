# SPDX-License-Identifier: Apache-2.0
"""pdsh: starts one agent per host, through ssh.

pdsh joins the words of the command with spaces, replaces ``%n`` by the number of the host (in the order of `-w`), and
passes the result to the login shell of each host.

pdsh waits for all hosts when one fails, and does not end the remote side when it is ended itself; agents rely on the
connection on which they have called the launcher back. The contact, with the secret of the job, is an argument here,
which other users of these hosts can read with `ps`: they could pose as an agent and receive the forwarded variables.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from anyaccel.launch.job import ClusterJob
from anyaccel.launch.runners import check_hosts, ssh_options, start_environment

_NUMBER = "%n"  # pdsh's own word for the number of the host


def build_command(job: ClusterJob) -> list[str]:
    """The argument vector of pdsh.

    -S: the exit code is the largest of all hosts.
    -R ssh: the default in Debian is rsh.
    -b: one Ctrl-C ends it, instead of two within a second.
    -N: no prefix before lines; `--rank-prefix` adds ours.
    -f: start on all hosts at once, as the job waits for all of them.
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
    """A word quoted for the login shell of a host, and for pdsh."""
    return shlex.quote(text).replace("%", "%%")


def launcher_environment(job: ClusterJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the job, and pdsh's options for ssh."""
    options = [environ.get("PDSH_SSH_ARGS_APPEND", ""), *ssh_options(job)]
    return {"PDSH_SSH_ARGS_APPEND": " ".join(filter(None, options))}
