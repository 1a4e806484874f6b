# SPDX-License-Identifier: Apache-2.0
"""Reads hostfiles, and selects the hosts and slots of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.launch.counts import MOST_IN_A_JOB, MOST_ON_A_HOST, parse_count, shorten
from anyaccel.launch.host_name import is_address, is_name
from anyaccel.launch.job import Host
from anyaccel.launch.small_file import read_small_file

_EXAMPLE = "write one host a line, such as: worker-0 slots=4"


def read_hostfile(path: str) -> dict[str, int]:
    """Slots of each host of a file, in its order; see `parse_hostfile`.

    Raises:
        UsageError: the file cannot be read, or is not a hostfile.
    """
    try:
        # Names are ASCII; a comment may be anything.
        text = read_small_file(path, "hostfile", encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"hostfile {path!r} cannot be read: {error.strerror}; check --hostfile") from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, name: str) -> dict[str, int]:
    """Slots of each host, in the order of the text.

    A line is ``host slots=N``; ``max_slots=M``, as Open MPI's hostfiles have it, is accepted and changes nothing.
    A host is a name, an IPv4 or an IPv6 address, with ``user@`` before it where needed. ``#`` begins a comment.

    Args:
        name: what messages call it: the path of the file.

    Raises:
        UsageError: a line is malformed, a host is there twice, or there is none. Names the line.
    """
    hosts: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}:{number}"
        host = _host(words[0], where)
        slots = _slots(words, where)
        machine = machine_name(host).lower()
        if machine in lines:
            raise UsageError(
                f"{where}: host {host!r} is in line {lines[machine]} already; give each host once, with all its slots"
            )
        lines[machine] = number
        hosts[host] = slots
    if not hosts:
        raise UsageError(f"{name}: no host in this hostfile; {_EXAMPLE}")
    return hosts


def machine_name(host: str) -> str:
    """The host without the user before it."""
    return host.rpartition("@")[2]


def _host(word: str, where: str) -> str:
    user, at, machine = word.rpartition("@")
    if machine.startswith("[") and machine.endswith("]"):
        machine = machine[1:-1]  # ssh and the others take an IPv6 address without
    if at and not is_name(user):
        raise UsageError(f"{where}: {user!r} in {word!r} is not a user name; {_EXAMPLE}")
    if not (is_name(machine) or is_address(machine)):
        if ":" in machine and is_name(machine.partition(":")[0]):
            host, _, count = machine.partition(":")
            example = f"{user}{at}{host} slots={count if count.isdecimal() else 1}"
            raise UsageError(f"{where}: {word!r} is the syntax of another launcher; write: {example}")
        raise UsageError(f"{where}: {word!r} is not the name of a host; {_EXAMPLE}")
    return f"{user}{at}{machine}"


def _slots(words: Sequence[str], where: str) -> int:
    counts: dict[str, int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if key not in ("slots", "max_slots") or not equals:
            raise UsageError(f"{where}: {word!r} is not understood; {_EXAMPLE}")
        if key in counts:
            raise UsageError(f"{where}: {key}= is given twice; give it once")
        count = parse_count(value)
        if count is None or not 1 <= count <= MOST_ON_A_HOST:
            raise UsageError(f"{where}: {shorten(word)}: the number of slots must be 1 to {MOST_ON_A_HOST}")
        counts[key] = count
    if "slots" not in counts:
        raise UsageError(f"{where}: host {words[0]!r} has no number of slots; write: {words[0]} slots=1")
    if counts.get("max_slots", counts["slots"]) < counts["slots"]:
        raise UsageError(f"{where}: max_slots={counts['max_slots']} is below slots={counts['slots']}; make them agree")
    return counts["slots"]


def select_hosts(
    hosts: Mapping[str, int], include: str = "", exclude: str = "", num_nodes: int | None = None
) -> tuple[Host, ...]:
    """The hosts and slots that take part, in the order of `hosts`.

    Args:
        hosts: slots of each host.
        include: what takes part, as ``host:slot,slot@host``; a host without slots means all of them, and ``0-3`` is
            a range. "" for everything. A host with a user may be named with and without it.
        exclude: what does not take part, written likewise.
        num_nodes: only so many hosts, the first of those; None for all.

    Raises:
        UsageError: both are given, a host or slot is unknown, nothing is left, or there are more slots in all than any
            job has workers.
    """
    if sum(hosts.values()) > MOST_IN_A_JOB:
        raise UsageError(
            f"{sum(hosts.values())} slots on {len(hosts)} hosts: a job has at most {MOST_IN_A_JOB} workers; "
            "correct slots= in the hostfile"
        )
    if include and exclude:
        raise UsageError("--include and --exclude contradict each other; use one of them")
    slots = {host: set(range(count)) for host, count in hosts.items()}
    if include:
        slots = _parse_selection(include, hosts, "--include")
    elif exclude:
        for host, gone in _parse_selection(exclude, hosts, "--exclude").items():
            slots[host] -= gone
    chosen = tuple(Host(host, tuple(sorted(slots[host]))) for host in hosts if slots.get(host))
    if not chosen:
        raise UsageError(f"--exclude {exclude!r} leaves no slot of any host; leave something to work on")
    if num_nodes is None:
        return chosen
    if num_nodes < 1:
        raise UsageError(f"--num_nodes is {num_nodes}, it must be at least 1")
    if num_nodes > len(chosen):
        plural = "" if len(chosen) == 1 else "s"
        raise UsageError(f"--num_nodes is {num_nodes}, but there are {len(chosen)} host{plural}: {_names(chosen)}")
    return chosen[:num_nodes]


def _parse_selection(text: str, hosts: Mapping[str, int], option: str) -> dict[str, set[int]]:
    known = {machine_name(host): host for host in hosts} | {host: host for host in hosts}
    found: dict[str, set[int]] = {}
    parts = text.split("@")
    while parts:
        part = parts.pop(0)
        # The "@" between two hosts may also be that of user@host.
        split = _split(f"{part}@{parts[0]}", known) if parts else None
        if split is not None and split[0].startswith(f"{part}@"):
            parts.pop(0)
        else:
            split = _split(part, known)
        if split is None:
            name = part.partition(":")[0] if part.count(":") < 2 else part
            if not name:
                raise UsageError(f"{option} {text!r}: a host is missing; write it as worker-0:0,2@worker-1")
            some = _names([Host(host, ()) for host in hosts])
            raise UsageError(f"{option} {text!r}: host {name!r} is not in the hostfile, which has {some}")
        host, numbers = split
        count = hosts[host]
        chosen = range(count) if numbers is None else _parse_slots(numbers, count, host, f"{option} {text!r}")
        found.setdefault(host, set()).update(chosen)
    return found


def _split(part: str, known: Mapping[str, str]) -> tuple[str, str | None] | None:
    """Host and slots of one part, which may be an IPv6 address with colons; None if no host has this name."""
    name, colon, slots = part.rpartition(":")
    for candidate, rest in ((part, None), (name, slots if colon else None)):
        bare = candidate.replace("[", "").replace("]", "")
        if bare in known:
            return known[bare], rest
    return None


def _parse_slots(text: str, count: int, host: str, where: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        numbers = [first, last] if dash else [first]
        low, high = parse_count(numbers[0]), parse_count(numbers[-1])
        if low is None or high is None:
            raise UsageError(f"{where}: {shorten(part)} is not a slot number; write slots as 0,2 or 0-3")
        if low > high:
            raise UsageError(f"{where}: {part!r} is no range; write it as {high}-{low}")
        if high >= count:
            raise UsageError(f"{where}: host {host} has no slot {high}; it has slots 0 to {count - 1}")
        found.update(range(low, high + 1))
    return found


def _names(hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
