# SPDX-License-Identifier: Apache-2.0
"""Resolves names of hosts, and finds addresses and network interfaces of this one."""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from anyaccel.errors import CommError, UsageError

_SIOCGIFADDR = 0x8915
_RESOLVING = 32  # names that are resolved at the same time


def is_this_host(name: str) -> bool:
    """Whether a name of a hostfile means the host that this process runs on."""
    return are_this_host([name])[0]


def are_this_host(names: Sequence[str]) -> list[bool]:
    """`is_this_host` of many names, which are resolved at the same time."""
    own = ("localhost", socket.gethostname().lower())
    # `user@host` never means this process: its agent runs as that user, on whatever host.
    asked = [name for name in names if "@" not in name and name.lower() not in own]
    known = dict(zip(asked, _resolve_all(asked), strict=True))
    return [
        name.lower() in own or any(_is_local_address(family, address) for family, address in known.get(name, []))
        for name in names
    ]


def resolves_to_loopback(name: str) -> bool:
    """Whether a name such as `localhost` resolves to the loopback, and so means a different host on each host.

    This host's own name does not count, even if it resolves to the loopback here.
    """
    if name.lower() in (socket.gethostname().lower(), "localhost"):
        return name.lower() == "localhost"
    found = [address for _, address in _resolve(name)]
    return bool(found) and all(
        address in ("127.0.0.1", "::1") or (address == name and name.startswith("127.")) for address in found
    )


def own_addresses(hosts: Sequence[str]) -> list[str]:
    """Addresses of this host, those that face `hosts` first."""
    found = []
    for addresses in _resolve_all([host.rpartition("@")[2] for host in hosts]):
        for family, address in addresses:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address, 9))  # sends nothing
                except OSError:
                    continue
                found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def rank0_address(connections: Sequence[str]) -> str:
    """The first host's address as the others see it, taken from the connections between the launcher and the hosts.

    Args:
        connections: for each host "LAUNCHER-ADDRESS LAUNCHER-PORT HOST-ADDRESS HOST-PORT", as in SSH_CONNECTION; "" for
            the launcher's own host.

    Raises:
        UsageError: only its own host can reach the address.
    """
    words = [connection.split() for connection in connections]
    elsewhere = [each for each in words if each and each[0] != each[2]]
    if words[0] in elsewhere:
        address = words[0][2]
    else:
        # The first host is this one: another host knows the address that the launcher has called it from.
        address = elsewhere[0][0] if elsewhere else "127.0.0.1"
    if elsewhere and (address.startswith("127.") or address == "::1"):
        raise UsageError(f"the other hosts cannot reach rank 0 at {address}; give its address with --master_addr")
    return address


def addresses_of_interface(name: str) -> list[str]:
    """The IPv4 address of a network interface; [] where it has none, or is not there."""
    request = struct.pack("256s", os.fsencode(name)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])]
        except OSError:
            return []


def addresses_for_others() -> list[str]:
    """Where ranks of other hosts reach this host.

    At the interfaces of GLOO_SOCKET_IFNAME; else at the address from which it reaches rank 0, as all hosts do.

    Raises:
        CommError: there is none.
    """
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME", ""):
        found = [address for name in interfaces.split(",") for address in addresses_of_interface(name.strip())]
        if not found:
            raise CommError(
                f"GLOO_SOCKET_IFNAME={interfaces}: there is no such interface here that has an IPv4 address"
            )
        return found
    return own_addresses([os.environ.get("MASTER_ADDR") or socket.gethostname()])


def interface_towards(address: str) -> str | None:
    """The network interface whose own address reaches `address`; None where that cannot be told."""
    for family, target in _resolve(address):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))  # sends nothing
                own = probe.getsockname()[0]
            except OSError:
                continue
        # If the target is this host, the route leads through the loopback: take the target's interface.
        for name in [name for _, name in socket.if_nameindex()]:
            found = addresses_of_interface(name) if family == socket.AF_INET else _ipv6_addresses(name)
            if own in found or target in found:
                return name
    return None


def _ipv6_addresses(interface: str) -> list[str]:
    try:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0])) for line in lines if line[5] == interface]


def hostname_is_loopback() -> bool:
    """Whether this host's name, from which gloo takes its address, resolves to nothing or to the loopback only."""
    found = _resolve(socket.gethostname())
    return all(address.startswith("127.") or address == "::1" for _, address in found)


def _resolve_all(names: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Resolve many names at once, so that a name server that does not answer costs its time-out only once."""
    if len(names) < 2:
        return [_resolve(name) for name in names]
    left = list(dict.fromkeys(names))
    answers: queue.SimpleQueue[tuple[str, list[tuple[int, str]] | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                name = left.pop()
            except IndexError:
                return
            try:
                answers.put((name, _resolve(name)))
            except BaseException as error:  # noqa: BLE001 - raised below
                answers.put((name, error))

    # Daemon threads and a queue: after Ctrl-C the interpreter would wait for other threads at exit, and in Python 3.11
    # an interrupted Thread.join() considers the thread ended.
    asked = len(left)
    for _ in range(min(_RESOLVING, asked)):
        threading.Thread(target=work, name="resolve", daemon=True).start()
    found: dict[str, list[tuple[int, str]]] = {}
    for _ in range(asked):
        name, answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        found[name] = answer
    return [found[name] for name in names]


def _resolve(name: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for an invalid name: too long, or with an empty part
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _is_local_address(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing; a socket to an address of this host is bound to that address
        except OSError:
            return False
        return bool(probe.getsockname()[0] == address)
