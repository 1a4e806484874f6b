# SPDX-License-Identifier: Apache-2.0
"""The agent: starts and supervises the workers of its host for a launcher on another host.

`python -m anyaccel.launch.cluster.node` is started by the launcher, never by a user: by ssh, once per host, with
standard input and standard error as the connection; by pdsh, once per host, with its number and the contact as
arguments; by mpirun or srun, once per rank, with the contact in the environment. The last two call the launcher back.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from anyaccel import _native
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.launch.cluster import channel
from anyaccel.launch.cluster.channel import encode_frame, read_line
from anyaccel.launch.cluster.task import Task
from anyaccel.launch.failure import Report
from anyaccel.launch.local.launcher import say_warnings
from anyaccel.launch.local.protocol import Link
from anyaccel.launch.local.supervise import supervise
from anyaccel.launch.local.worker import PASSED_ON
from anyaccel.launch.output import LEVELS, Output
from anyaccel.launch.plan.local_rank import RankFromEnvironment, rank_from_environment
from anyaccel.launch.plan.plan import LaunchPlan
from anyaccel.launch.plan.planning import free_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Seconds until the launcher's first message must come, and then the next heartbeat.
_FIRST_MESSAGE_S = 60.0
_HEARTBEAT_TIMEOUT_S = 20.0  # long, as the launcher may be busy with agents that are not ready yet
# Seconds that the launcher has to read the final report.
_REPORT_S = 2.0


class _Agent:
    """An agent, however it was started.

    Args:
        secret: secret of the job.
        source: descriptor from which the launcher's messages are read.
        output: where messages to the launcher are written.
        connection: "LAUNCHER-ADDRESS LAUNCHER-PORT HOST-ADDRESS HOST-PORT" as in SSH_CONNECTION; "" on the launcher's
            own host.
        found: below MPI, the rank of its only worker; None for all ranks of the host.
    """

    def __init__(
        self, secret: str, source: int, output: Output, connection: str, found: RankFromEnvironment | None
    ) -> None:
        self._secret = secret
        self._source = source
        self._output = output
        self._connection = connection
        self._found = found

    def _frame(self, kind: str, data: Any) -> bytes:
        return encode_frame(self._secret, kind, data)

    def run(self, first: Mapping[str, Any]) -> int:
        """Plan, report to the launcher, and run the workers; `first` is the launcher's first message."""
        try:
            task = Task.decode(first["task"])
            node = first["number"] if self._found is None else self._node(task, self._found)
            task.enter()
            plan = task.plan(node)
            is_first = task.place(node).first_rank == 0 and (self._found is None or self._found.local_rank == 0)
            port = free_port(task.options.master_port) if is_first else None
        except (AnyAccelError, OSError) as error:
            return self._refuse(error)
        speaks = self._found is None or self._found.local_rank == 0
        ready = {
            "connection": self._connection,
            "port": port,
            "machine": _machine(),
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        self._output.write(self._frame(channel.READY, {**ready, "plan": plan.render() if speaks else ""}))
        master = read_line(self._source, _HEARTBEAT_TIMEOUT_S)
        if "together" in master:
            task = replace(task, together=tuple(master["together"]))
            try:
                plan = task.plan(node)
            except AnyAccelError as error:
                names = ", ".join(task.hosts[other].name for other in task.together)
                return self._refuse(UsageError(f"{error} (hosts {names} are one machine)"))
            self._output.write(self._frame(channel.READY, {**ready, "plan": plan.render() if speaks else ""}))
            master = read_line(self._source, _HEARTBEAT_TIMEOUT_S)
        task = task.with_master(master["address"], master["port"])
        return self._start(task, node, task.plan(node), speaks)

    def _refuse(self, error: Exception) -> int:
        """Tell the launcher why this host cannot take part; returns the exit code."""
        code = error.exit_code if isinstance(error, AnyAccelError) else 1
        self._output.write(self._frame(channel.REFUSED, {"message": str(error), "code": code}))
        self._output.close(_FIRST_MESSAGE_S)
        return 0

    @staticmethod
    def _node(task: Task, found: RankFromEnvironment) -> int:
        """The number of the host that has this rank by the hostfile.

        Raises:
            UsageError: the launcher has placed ranks in another way.
        """
        if found.world_size not in (None, task.world_size):
            raise UsageError(
                f"{found.source} started {found.world_size} ranks, and the hosts have {task.world_size} slots; "
                "check --launcher_args"
            )
        node = task.node_of_rank(found.rank or 0)
        if found.rank != task.place(node).first_rank + found.local_rank:
            _check_names_of_this_machine(task, node, found)
            raise UsageError(
                f"{found.source} gave rank {found.rank} the local rank {found.local_rank}: it has not placed ranks "
                "host by host in the order of the hostfile; check --launcher_args"
            )
        return node

    def _start(self, task: Task, node: int, plan: LaunchPlan, speaks: bool) -> int:
        host = task.hosts[node].name
        workers = task.workers(plan, node)
        if self._found is not None:
            workers = [workers[self._found.local_rank]]
        name = f"anyaccel on {host}"
        if speaks:
            say_warnings(plan, task.options, name)
        link = Link(
            self._source,
            channel.HEARTBEAT_TIMEOUT,
            self._output,
            announce=lambda failure: self._frame(channel.FAILED, Report(failure=failure).encode()),
            conclude=lambda report: self._frame(channel.FINISHED, report.encode()),
        )
        console = self._output if self._output.is_standard_error else Output(2)
        console.become(name, LEVELS[task.options.log_level])
        supervise(workers, task.options.grace_period, options=task.options, link=link, console=console, host=host)
        return 0  # the launcher knows the code; mpirun or srun would report another as a failure of its own


def _check_names_of_this_machine(task: Task, node: int, found: RankFromEnvironment) -> None:
    """Raise UsageError if the job has several names for this machine, which the launcher counts as one host."""
    from anyaccel.launch.cluster.address import are_this_host

    here = are_this_host([host.name.rpartition("@")[2] for host in task.hosts])
    ours = [number for number, is_here in enumerate(here) if is_here or number == node]
    before = sum(len(task.hosts[number].slots) for number in ours if number < node)
    if len(ours) > 1 and found.local_rank == before + (found.rank or 0) - task.place(node).first_rank:
        names = [task.hosts[number].name for number in ours]
        slots = sum(len(task.hosts[number].slots) for number in ours)
        raise UsageError(
            f"{' and '.join(names)} are one machine under {len(names)} names, whose ranks {found.source} numbers "
            f"together; write it once, with all of its slots ({names[0]} slots={slots}), or use --launcher ssh"
        )


def _machine() -> str:
    """An identity of this machine, the same in all of its containers and under all of its names; "" where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _take_standard_input() -> int:
    """Move standard input to another descriptor, which is returned; workers get /dev/null in its place."""
    descriptor = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return descriptor


def _behind_ssh() -> int:
    source = _take_standard_input()
    first = read_line(source, _FIRST_MESSAGE_S)
    return _Agent(first["secret"], source, Output(2), os.environ.get("SSH_CONNECTION", ""), None).run(first)


def _calling_back(contact_text: str, number: int | None) -> int:
    """Run the agent below pdsh (`number` is that of the host), or below mpirun or srun (None)."""
    from anyaccel.launch.cluster.callback import Contact

    os.close(_take_standard_input())
    # The end of the parent daemon is a request to end, with a grace period for the workers.
    _native.set_parent_death_signal(signal.SIGTERM)
    contact = Contact.decode(contact_text)
    found = rank_from_environment(os.environ, launcher_only=True) if number is None else None
    connection = contact.call()
    connection.setsockopt(6, 1, 1)  # IPPROTO_TCP, TCP_NODELAY
    ours, its = connection.getsockname()[0], connection.getpeername()[0]
    descriptor = connection.detach()
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    output = Output(descriptor)
    mine = number if found is None else found.rank
    output.write(encode_frame(contact.secret, channel.HELLO, {"number": mine, "host": os.uname().nodename}))
    first = read_line(descriptor, _FIRST_MESSAGE_S)
    # A dual-stack socket shows IPv4 addresses as IPv6 ones.
    ends = [address.removeprefix("::ffff:") for address in (its, ours)]
    called = "" if ends[0] == ends[1] else f"{ends[0]} 0 {ends[1]} 0"
    code = _Agent(contact.secret, descriptor, output, called, found).run(first)
    _close_gracefully(descriptor)
    return code


def _close_gracefully(descriptor: int) -> None:
    """Close the connection so that all sent data arrives: closing it with unread input would reset it."""
    import socket

    with socket.socket(fileno=descriptor) as connection:
        try:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_REPORT_S)
            deadline = time.monotonic() + _REPORT_S
            while connection.recv(4096) and time.monotonic() < deadline:
                continue
        except OSError:
            return  # it is gone, or does not answer


def main(arguments: list[str]) -> int:
    """Run the agent; returns 0 when the launcher has been told how the job ended."""
    for passed_on in PASSED_ON:  # which ssh and others were started to ignore, and Python ends by
        signal.signal(passed_on, lambda _number, _frame: None)
    try:
        if not arguments and "ANYACCEL_CONTACT" not in os.environ:
            return _behind_ssh()
        number = int(arguments[0]) if arguments else None
        contact = arguments[1] if arguments else os.environ.pop("ANYACCEL_CONTACT")
        return _calling_back(contact, number)
    except channel.HungUpError:
        return 1  # nothing was started, and the launcher has reported why
    except AnyAccelError as error:
        Output().line(f"error: host {os.uname().nodename}: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
