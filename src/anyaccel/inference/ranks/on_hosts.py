# SPDX-License-Identifier: Apache-2.0
"""The ranks of a command on the hosts of a hostfile, which the launcher of several hosts starts and which call back.

A rank authenticates itself with the secret of the job, which is forwarded like the launcher's own, never on a command
line. Its connection then serves like the socket pair of a rank on this machine.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from anyaccel import env
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.native.loading_watch import STARTING
from anyaccel.inference.ranks.channel import Channel
from anyaccel.inference.ranks.control import EXIT_GRACE, RankError
from anyaccel.inference.ranks.processes import GRACE, Processes

if TYPE_CHECKING:
    from anyaccel.inference.options import ModelOptions
    from anyaccel.launch.cluster.callback import AgentListener
    from anyaccel.launch.cluster.cluster import ClusterOptions
    from anyaccel.launch.job import Host

# Tells the ranks the contact; not meant for users.
CONTACT = "ANYACCEL_COMMAND_CONTACT"
_SLICE_MS = 500.0


def find_ranks(cluster: ClusterOptions, options: ModelOptions) -> tuple[Host, ...]:
    """The hosts, whose slots must be as many as the ranks.

    Raises:
        UsageError: the hostfile cannot be read, or its hosts have another number of slots.
    """
    from anyaccel.launch.cluster.cluster import find_hosts

    hosts = find_hosts(_options(), cluster, os.environ)
    slots = sum(len(host.slots) for host in hosts)
    if slots != options.ranks:
        names = ", ".join(f"{host.name} {len(host.slots)}" for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        count = "is one rank" if options.ranks == 1 else f"are {options.ranks} ranks"
        raise UsageError(
            f"{options.rank_options} {count}, and the hosts of {cluster.hostfile} have {slots} slots ({names}); ask "
            "for as many, or choose some with --include"
        )
    return hosts


def describe(hosts: tuple[Host, ...], launcher: str | None) -> str:
    """A description of the hosts and their ranks."""
    first, parts = 0, []
    for host in hosts:
        last = first + len(host.slots) - 1
        parts.append(f"{host.name} (rank{f's {first}-{last}' if last > first else f' {first}'})")
        first = last + 1
    return f"hosts: {', '.join(parts)}, by {launcher or 'ssh'}"


def _options(bind: bool = True) -> Any:
    from anyaccel.launch.plan.options import LaunchOptions

    return LaunchOptions(
        script="anyaccel.inference.ranks.rank",
        module=True,
        local_rank_argument=False,
        grace_period=GRACE,
        bind_cores=bind,
        log_level="error",
    )


class HostProcesses(Processes):
    """One rank for each slot of these hosts.

    Raises:
        RankError: the launcher could not start them, and has reported why.
    """

    def __init__(self, cluster: ClusterOptions, hosts: tuple[Host, ...]) -> None:
        from dataclasses import replace

        from anyaccel.launch.cluster.callback import AgentListener
        from anyaccel.launch.cluster.cluster import run_cluster

        self._timeout = env.ANYACCEL_COMM_TIMEOUT.get()
        places = [host.name for host in hosts for _ in host.slots]
        self._found: dict[int, Channel] = {}
        self._count = len(places)
        listener = AgentListener(secrets.token_hex(16), [host.name for host in hosts], self._on_hello, len(places))
        try:
            exports = (*cluster.exports, f"{CONTACT}={listener.contact.encode()}")
            job = replace(cluster, exports=exports)
            super().__init__(lambda: run_cluster(_options(), job))
            self.names = [f"rank {rank} on {place}" for rank, place in enumerate(places)]
            try:
                self._gather(listener)
            except BaseException:
                self.channels = list(self._found.values())
                self.end(EXIT_GRACE)
                raise
            self.channels = [self._found[rank] for rank in sorted(self._found)]
        finally:
            listener.close()

    def _on_hello(self, connection: socket.socket, _reader: object, data: Any) -> None:
        rank = data.get("rank") if isinstance(data, dict) else None
        if not isinstance(rank, int) or not 0 <= rank < self._count or rank in self._found:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._found[rank] = Channel(connection.detach(), self._timeout)

    def _gather(self, listener: AgentListener) -> None:
        """Wait until all ranks have called back. The launcher has deadlines for hosts, and ends if a rank does.

        Raises:
            RankError: the launcher has ended, or some ranks have not called long after the first one has.
        """
        limit = max(self._timeout, STARTING)
        left = limit  # as in Ranks._wait, only time in which the ranks could run counts
        while len(self._found) < self._count:
            start = time.monotonic()
            poller = select.poll()
            for descriptor in listener.to_read():
                poller.register(descriptor, select.POLLIN)
            for descriptor, _ in poller.poll(_SLICE_MS):
                listener.read(descriptor)
            listener.drop_silent()
            if (code := self.code()) is not None:
                raise RankError("no ranks were started; the messages above say why", code or 1)
            if self._found:  # before that they may wait in the queue of a cluster
                left -= min(time.monotonic() - start, _SLICE_MS / 1000)
            if left < 0:
                names = ", ".join(name for rank, name in enumerate(self.names) if rank not in self._found)
                raise RankError(
                    f"{names} did not start within {limit:g} s of the others (ANYACCEL_COMM_TIMEOUT); is it stopped?"
                )


def call_command() -> Channel:
    """Called in a rank: a channel to the command, which sends the first message.

    Raises:
        AnyAccelError: it cannot be reached.
    """
    from anyaccel.launch.cluster.callback import Contact
    from anyaccel.launch.cluster.channel import HELLO, encode_frame

    text = os.environ.pop(CONTACT, "")
    if not text:
        raise AnyAccelError(f"{CONTACT} is not set: `anyaccel generate --hostfile` starts this")
    contact = Contact.decode(text)
    connection = contact.call()
    with suppress(OSError):  # raised for other than TCP sockets
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection.detach(), env.ANYACCEL_COMM_TIMEOUT.get())
    hello = encode_frame(contact.secret, HELLO, {"rank": int(os.environ["RANK"])})
    while hello:
        hello = hello[os.write(channel.descriptor, hello) :]
    return channel
