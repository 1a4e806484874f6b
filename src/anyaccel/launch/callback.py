# SPDX-License-Identifier: Apache-2.0
"""How agents below mpirun, srun or pdsh find the launcher: they call it back through TCP.

The launchers' own exit codes and signals do not suffice: MPICH's and Intel's mpiexec go on when a rank exits with an
error, srun returns the largest code rather than the first, MPICH returns 0 after SIGTERM, and pdsh leaves remote
commands alive. What a caller must know is the secret word of the job.
"""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anyaccel.launch.address import own_addresses
from anyaccel.launch.channel import ConnectionLostError, FrameReader

# The environment variable that brings the contact to the agents, where the launcher passes variables on.
VARIABLE = "ANYACCEL_CONTACT"
# Seconds that a caller has to send the secret word, and an agent to reach one of the launcher's addresses.
_INTRODUCTION = 10.0
_CONNECT = 10.0
# Seconds that a caller has while others are waiting to connect; an agent sends the word as soon as it connects.
_BRIEF = 1.0
# Connections that are accepted before their callers have sent the word; further ones wait in the kernel's queue.
_MOST_STRANGERS = 4096
_FEWEST_STRANGERS = 16
# File descriptors that are left for everything else.
_KEPT_FREE = 48
# Connections that are accepted in a row before messages of agents are read again.
_AT_ONCE = 256


@dataclass(frozen=True)
class Contact:
    """Where the launcher listens, and the secret word. Its text form needs no quoting in any shell."""

    port: int
    word: str
    addresses: tuple[str, ...]

    def encode(self) -> str:
        """As text: ``PORT/WORD/ADDRESS/ADDRESS``."""
        return "/".join([str(self.port), self.word, *self.addresses])

    @classmethod
    def decode(cls, text: str) -> Contact:
        """The opposite of `encode`."""
        port, word, *addresses = text.split("/")
        return cls(int(port), word, tuple(addresses))

    def call(self) -> socket.socket:
        """A connection to the launcher.

        Raises:
            ConnectionLostError: none of its addresses answers.
        """
        deadline = time.monotonic() + _CONNECT
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
                # All at once: an address of another network may not even refuse.
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


def _free_descriptors() -> int:
    """How many files this process may still open, about."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_STRANGERS * 2
    probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # the lowest free number
    os.close(probe)
    return soft - probe


class Reception:
    """Listens for agents, and lets in those that know the word.

    Anybody on the network may connect, and say nothing. The number of such callers is bounded by the limit on open
    files; when it is reached, those that have been silent for a second make room.

    Args:
        hosts: names of the job's hosts: the launcher's addresses that face them are tried first.
        on_hello: called with connection, reader and what the agent said; takes over both.
        agents: number of those that are expected.
    """

    def __init__(
        self,
        word: str,
        hosts: Sequence[str],
        on_hello: Callable[[socket.socket, FrameReader, Any], None],
        agents: int = 0,
    ) -> None:
        self._on_hello = on_hello
        self._strangers: dict[int, tuple[socket.socket, FrameReader, float]] = {}
        self._most = max(_FEWEST_STRANGERS, min(_MOST_STRANGERS, _free_descriptors() - agents - _KEPT_FREE))
        self._is_full = False
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self.contact = Contact(self._listener.getsockname()[1], word, tuple(own_addresses(hosts)))

    def to_read(self) -> list[int]:
        """Descriptors to wait for."""
        if self._listener.fileno() < 0:
            return []
        return [*([] if self._is_full else [self._listener.fileno()]), *self._strangers]

    def read(self, descriptor: int) -> None:
        """Accept waiting callers, or read from one of them."""
        if descriptor != self._listener.fileno():
            self._hear(descriptor)
            return
        for _ in range(_AT_ONCE):
            self._is_full = len(self._strangers) >= self._most
            if self._is_full:
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                # Otherwise nobody is left, or has gone again.
                self._is_full = error.errno in (errno.EMFILE, errno.ENFILE)
                return
            self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        number = connection.fileno()
        reader = FrameReader(
            self.contact.word,
            lambda _kind, data: self._introduce(number, data),
            lambda _text: self._dismiss(number),
        )
        self._strangers[number] = connection, reader, time.monotonic() + _INTRODUCTION

    def _hear(self, number: int) -> None:
        if number not in self._strangers:
            return  # sent away a moment ago
        connection, reader, _ = self._strangers[number]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            reader.feed(data)
        else:
            self._dismiss(number)

    def _introduce(self, number: int, data: Any) -> None:
        if number in self._strangers:
            connection, reader, _ = self._strangers.pop(number)
            self._on_hello(connection, reader, data)

    def _dismiss(self, number: int) -> None:
        if number in self._strangers:
            self._strangers.pop(number)[0].close()

    def tidy(self) -> None:
        """Drop callers that have not sent the word in time; that time is short while others are waiting to connect."""
        latest = time.monotonic() + (_INTRODUCTION - _BRIEF if self._is_full else 0)
        for number, (_, _, deadline) in list(self._strangers.items()):
            if latest > deadline:
                self._dismiss(number)
        # Whoever is let in next is told whether there is room; without strangers, it is agents that take it all.
        self._is_full = self._is_full and len(self._strangers) >= self._most

    def close(self) -> None:
        """Stop listening, and drop callers that have not sent the word."""
        self._listener.close()
        for number in list(self._strangers):
            self._dismiss(number)
