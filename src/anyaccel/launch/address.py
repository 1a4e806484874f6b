# SPDX-License-Identifier: Apache-2.0
"""Names and addresses of hosts."""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence

from anyaccel.errors import UsageError

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
    known = dict(zip(asked, _addresses_of(asked), strict=True))
    return [
        name.lower() in own or any(_is_ours(family, address) for family, address in known.get(name, []))
        for name in names
    ]


def means_whoever_asks(name: str) -> bool:
    """Whether a name, such as `localhost`, means another host on each host. Its own name does not."""
    if name.lower() in (socket.gethostname().lower(), "localhost"):
        return name.lower() == "localhost"
    found = [address for _, address in _addresses(name)]
    return bool(found) and all(
        address in ("127.0.0.1", "::1") or (address == name and name.startswith("127.")) for address in found
    )


def own_addresses(hosts: Sequence[str]) -> list[str]:
    """Addresses of this host, those that face `hosts` first."""
    found = []
    for addresses in _addresses_of([host.rpartition("@")[2] for host in hosts]):
        for family, address in addresses:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address, 9))  # sends nothing
                except OSError:
                    continue
                found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def address_of_first(connections: Sequence[str]) -> str:
    """The first host's address as the others see it: each end of a connection knows both addresses.

    Args:
        connections: of each host, "ITS-ADDRESS ITS-PORT OUR-ADDRESS OUR-PORT" as in SSH_CONNECTION, where "its" is the
            launcher's; "" for one on the launcher's own host.

    Raises:
        UsageError: it is an address that only its own host can reach.
    """
    words = [connection.split() for connection in connections]
    elsewhere = [each for each in words if each and each[0] != each[2]]
    if words[0] in elsewhere:
        address = words[0][2]  # from here to it
    else:
        # It is this host: the first one elsewhere says from where it was called.
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


def interface_towards(address: str) -> str | None:
    """The network interface whose own IPv4 address reaches `address`; None where that cannot be told."""
    for family, target in _addresses(address):
        if family != socket.AF_INET:
            continue
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
                own = probe.getsockname()[0]
                for _, name in socket.if_nameindex():
                    # Where the target is ours, the way to it is the loopback, and others come in at its interface.
                    if addresses_of_interface(name) in ([own], [target]):
                        return name
            except OSError:
                continue
    return None


def hostname_is_loopback() -> bool:
    """Whether this host's own name leads nowhere, or only to itself: gloo takes its address from it."""
    found = _addresses(socket.gethostname())
    return all(address.startswith("127.") or address == "::1" for _, address in found)


def _addresses_of(names: Sequence[str]) -> list[list[tuple[int, str]]]:
    """A name server that does not answer costs its time-out once, not once a name."""
    if len(names) < 2:
        return [_addresses(name) for name in names]
    left = list(dict.fromkeys(names))
    answers: queue.SimpleQueue[tuple[str, list[tuple[int, str]] | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                name = left.pop()
            except IndexError:
                return
            try:
                answers.put((name, _addresses(name)))
            except BaseException as error:  # noqa: BLE001 - raised below
                answers.put((name, error))

    # After Ctrl-C nobody waits for a name server: not the end of the interpreter, which would for other threads, nor
    # Thread.join(), which in Python 3.11 takes a thread for one that has ended when it is interrupted.
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


def _addresses(name: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what can be no name of a host: too long, or with an empty part
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _is_ours(family: int, address: str) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing; the way to an own address begins at that address
        except OSError:
            return False
        return bool(probe.getsockname()[0] == address)
