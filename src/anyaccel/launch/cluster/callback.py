# SPDX-License-Identifier: Apache-2.0
"""The TCP connections by which agents below mpirun, srun or pdsh call the launcher back.

The launchers' own exit codes and signals do not suffice: MPICH's and Intel's mpiexec go on when a rank exits with an
error, srun returns the largest code rather than the first, MPICH returns 0 after SIGTERM, and pdsh leaves remote
commands alive. An agent authenticates itself with the secret of the job.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.launch.cluster.address import own_addresses
from anyaccel.launch.cluster.channel import ConnectionLostError, FrameReader

# The environment variable that tells the agents the contact, where the launcher passes variables on.
VARIABLE = "ANYACCEL_CONTACT"
# Seconds that a caller has to send the secret, and an agent to reach one of the launcher's addresses.
_AUTHENTICATION_S = 10.0
_CONNECT_S = 10.0
# Connections beyond the number of agents that have not sent the secret: when more come, the oldest is dropped.
_STRANGERS = 32
# Connections that are accepted in a row before messages of agents are read again.
_AT_ONCE = 16


@dataclass(frozen=True)
class Contact:
    """Where the launcher listens, and the secret of the job. Its text form needs no quoting in any shell."""

    port: int
    secret: str
    addresses: tuple[str, ...]

    def encode(self) -> str:
        """As text: ``PORT/SECRET/ADDRESS/ADDRESS``."""
        return "/".join([str(self.port), self.secret, *self.addresses])

    @classmethod
    def decode(cls, text: str) -> Contact:
        """The opposite of `encode`."""
        port, secret, *addresses = text.split("/")
        return cls(int(port), secret, tuple(addresses))

    def call(self) -> socket.socket:
        """A connection to the launcher.

        Raises:
            ConnectionLostError: none of its addresses answers.
        """
        deadline = time.monotonic() + _CONNECT_S
        with selectors.DefaultSelector() as selector:
            why = "no address"
            try:
                for address in self.addresses:
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    attempt = None
                    try:
                        attempt = socket.socket(family, socket.SOCK_STREAM)
                        attempt.setblocking(False)
                        number = attempt.connect_ex((address, self.port))
                    except OSError as error:  # no IPv6 here, an address with a zone
                        why = error.strerror or str(error)
                        if attempt:
                            attempt.close()
                        continue
                    if number in (0, errno.EINPROGRESS):
                        selector.register(attempt, selectors.EVENT_WRITE, address)
                    else:
                        why = os.strerror(number)
                        attempt.close()
                # All addresses at once, as one in another network may neither answer nor refuse.
                while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                    for key, _ in selector.select(left):
                        found = key.fileobj
                        assert isinstance(found, socket.socket)
                        selector.unregister(found)
                        number = found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                        if not number:
                            return found
                        why = os.strerror(number)
                        found.close()
            finally:
                for key in list(selector.get_map().values()):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()
        where = ", ".join(f"{address}:{self.port}" for address in self.addresses)
        raise ConnectionLostError(f"the launcher cannot be reached at {where}: {why}; a firewall may be in between")


class AgentListener:
    """Listens for agents, and accepts those that know the secret.

    Anybody on the network may connect and stay silent, so the number of such connections is bounded. An agent sends the
    secret as soon as it connects.

    Args:
        hosts: names of the job's hosts: the launcher's addresses that face them are tried first.
        on_hello: called with connection, reader and the agent's data; takes over both.
        agents: number of expected agents.
    """

    def __init__(
        self,
        secret: str,
        hosts: Sequence[str],
        on_hello: Callable[[socket.socket, FrameReader, Any], None],
        agents: int,
    ) -> None:
        self._on_hello = on_hello
        self._unauthenticated: dict[int, tuple[socket.socket, FrameReader, float]] = {}
        self._most = agents + _STRANGERS
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self.contact = Contact(self._listener.getsockname()[1], secret, tuple(own_addresses(hosts)))

    def to_read(self) -> list[int]:
        """Descriptors to wait for."""
        if self._listener.fileno() < 0:
            return []
        return [self._listener.fileno(), *self._unauthenticated]

    def read(self, descriptor: int) -> None:
        """Accept waiting callers, or read from one of them."""
        if descriptor != self._listener.fileno():
            self._read_from(descriptor)
            return
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none is left, or it was closed again
                return
            self._accept(connection)
            if len(self._unauthenticated) > self._most:
                oldest = next(iter(self._unauthenticated))
                self._read_from(oldest)
                self._drop(oldest)

    def _accept(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        number = connection.fileno()
        reader = FrameReader(
            self.contact.secret,
            lambda _kind, data: self._authenticated(number, data),
            lambda _text: self._drop(number),
        )
        self._unauthenticated[number] = connection, reader, time.monotonic() + _AUTHENTICATION_S

    def _read_from(self, number: int) -> None:
        if number not in self._unauthenticated:
            return  # it was dropped a moment ago
        connection, reader, _ = self._unauthenticated[number]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            reader.feed(data)
        else:
            self._drop(number)

    def _authenticated(self, number: int, data: Any) -> None:
        if number in self._unauthenticated:
            connection, reader, _ = self._unauthenticated.pop(number)
            self._on_hello(connection, reader, data)

    def _drop(self, number: int) -> None:
        if number in self._unauthenticated:
            self._unauthenticated.pop(number)[0].close()

    def drop_silent(self) -> None:
        """Drop callers that have not sent the secret in time."""
        now = time.monotonic()
        for number, (_, _, deadline) in list(self._unauthenticated.items()):
            if now > deadline:
                self._drop(number)

    def close(self) -> None:
        """Stop listening, and drop callers that have not sent the secret."""
        self._listener.close()
        for number in list(self._unauthenticated):
            self._drop(number)
