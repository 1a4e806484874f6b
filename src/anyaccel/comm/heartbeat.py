# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a group on several hosts do not live any more: gloo says that a connection ended, or nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

from anyaccel import _native, env
from anyaccel.errors import AnyAccelError, CommError, CommTimeoutError, PeerLostError
from anyaccel.launch.cluster.address import addresses_for_others

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0  # or a quarter of the deadline, if that is less
# A rank counts as silent after half the deadline, but not longer than that, and not before beats have been left out; a
# second is what the end of a process, or the connection that it had, may take until it is seen.
_SILENT_SECONDS = 10.0
_SILENT_BEATS = 2.5
_NOTICE_SECONDS = 1.0

# Those of this process by a name that all of their ranks have, and its rank in each. Groups of the same ranks share
# one.
_connected: WeakValueDictionary[str, _native.RankWatch] = WeakValueDictionary()
_own_rank: dict[str, int] = {}
_beat: dict[str, float] = {}  # seconds
_of_group: WeakKeyDictionary[dist.ProcessGroup, Heartbeat | None] = WeakKeyDictionary()


class Heartbeat:
    """What is known of the other ranks of a group, by their numbers in it.

    Attributes:
        name: the same on all ranks, and another one for each group.
    """

    def __init__(self, native: _native.RankWatch, numbers: Sequence[int], rank: int, name: str, limit_s: float) -> None:
        """`numbers`: of the group's ranks in `native`; `limit_s`: after which a rank counts as silent."""
        self._native, self._numbers, self._rank = native, tuple(numbers), rank
        self.name = name
        self._limit_s = limit_s
        self._places = 0

    def names(self) -> list[str]:
        """The ranks, with their hosts."""
        hosts = [self._native.name(number).partition(" on ")[2] for number in self._numbers]
        return [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]

    def look(self) -> list[_native.Seen]:
        """What has been heard of each rank."""
        seen = self._native.look()
        return [seen[number] for number in self._numbers]

    def explain(
        self,
        doing: str,
        error: BaseException,
        ranks: Sequence[int] | None = None,
        notice_s: float = _NOTICE_SECONDS,
    ) -> CommError | None:
        """The error to raise in place of another backend's, where a rank is the cause.

        Args:
            doing: what fails, for the text.
            error: that of the backend.
            ranks: those that this rank has waited for; default: all.
            notice_s: how long the end of a rank may take until it is seen.
        """
        end = time.monotonic() + notice_s
        names, others = self.names(), [rank for rank in ranks or range(len(self._numbers)) if rank != self._rank]
        while True:
            seen = self.look()
            # Those that time out themselves leave, so whoever is silent is the cause; else who has left first.
            silent = [rank for rank in others if seen[rank].left_s < 0 and seen[rank].silent_s > self._limit_s]
            left = sorted((rank for rank in others if seen[rank].left_s >= 0), key=lambda rank: -seen[rank].left_s)
            if silent:
                listed = ", ".join(names[rank] for rank in silent)
                least = min(seen[rank].silent_s for rank in silent)
                have, them = ("has", "it, or its host,") if len(silent) == 1 else ("have", "a process or a host")
                return CommTimeoutError(
                    f"{doing}: {listed} {have} not been heard of for {least:.0f} s; is {them} stopped or cut off?"
                )
            if left:
                return PeerLostError(f"{doing}: {names[left[0]]} ended or left ({error})")
            if time.monotonic() > end:
                return None
            time.sleep(0.02)

    def meet(self, check: Callable[[], None]) -> None:
        """Wait until all ranks have called it, however long that takes.

        Args:
            check: called now and then; raises an error where no more waiting makes sense.

        Raises:
            PeerLostError: a rank has ended.
        """
        self._places += 1
        place = _number(f"{self.name} {self._places}")
        self._native.arrive(place)
        pause = 0.001
        missing = [rank for rank in range(len(self._numbers)) if rank != self._rank]
        while True:
            seen = self.look()  # before the places: a rank may come and leave
            missing = [rank for rank in missing if not self._native.arrived(self._numbers[rank], place)]
            if not missing:
                return
            for rank in missing:
                if seen[rank].left_s >= 0:
                    raise PeerLostError(f"{self.names()[rank]} ended or left, while this rank waited for it")
            check()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def connect(exchange: Callable[[str], list[str]], rank: int, size: int, timeout_s: float) -> Heartbeat | None:
    """Heartbeat the ranks of a group on several hosts; a collective call.

    Args:
        exchange: tells all ranks a text, and returns those of all in rank order.
        timeout_s: how long a rank waits for others.

    Returns:
        None where a rank cannot listen, on all ranks: a warning says why.

    Raises:
        CommTimeoutError: a rank did not come; it is named.
        CommError: they cannot be connected.
    """
    held = dict(_connected)  # until all ranks have decided, which they do alike by what they exchange
    known = {name: _own_rank[name] for name in held}
    handshakes = [json.loads(text) for text in exchange(json.dumps({"known": known, "nonce": secrets.token_hex(8)}))]
    tag = handshakes[0]["nonce"]
    common = sorted(set.intersection(*(set(handshake["known"]) for handshake in handshakes)))
    if common:
        numbers = [handshake["known"][common[0]] for handshake in handshakes]
        return Heartbeat(held[common[0]], numbers, rank, tag, _silence(timeout_s, _beat[common[0]]))
    error, made, beat_s = "", None, min(_BEAT_SECONDS, timeout_s / 4)
    try:
        made = _native.RankWatch(rank, size, addresses_for_others(), beat_s)
    except (OSError, ValueError, AnyAccelError) as problem:
        error = str(problem)
    answers = [json.loads(text) for text in exchange(json.dumps([made.endpoint if made else "", error]))]
    problems = [f"rank {number}: {text}" for number, (_, text) in enumerate(answers) if text]
    if problems or made is None:
        logger.warning("ranks that are lost will not be named: %s", "; ".join(problems))
        return None
    try:
        made.connect([endpoint for endpoint, _ in answers], timeout_s)
    except (OSError, ValueError) as problem:
        raise CommError(f"the ranks of a group cannot be connected: {problem}") from problem
    name = hashlib.blake2b("\n".join(endpoint for endpoint, _ in answers).encode(), digest_size=16).hexdigest()
    _connected[name], _own_rank[name], _beat[name] = made, rank, beat_s
    return Heartbeat(made, range(size), rank, tag, _silence(timeout_s, beat_s))


def get_heartbeat(group: dist.ProcessGroup, hosts: Sequence[str]) -> Heartbeat | None:
    """The heartbeats of a group of any backend; None where all ranks are on one host. A collective call.

    Args:
        hosts: the host of each rank.

    Raises:
        As `connect`.
    """
    from anyaccel.comm import shm

    if len(set(hosts)) < 2:
        return None
    own: Heartbeat | None = getattr(group, "heartbeat", None)  # of a HierarchicalGroup
    if own is not None:
        return own
    if group not in _of_group:

        def exchange(text: str) -> list[str]:
            return [str(value) for value in shm.exchange_objects(group, text)]

        _of_group[group] = connect(exchange, group.rank(), group.size(), env.ANYACCEL_COMM_TIMEOUT.get())
    return _of_group[group]


def known_heartbeat(group: dist.ProcessGroup) -> Heartbeat | None:
    """What `heartbeat_of` has made of a group."""
    return _of_group.get(group)


def _silence(timeout_s: float, beat_s: float) -> float:
    return max(min(timeout_s / 2, _SILENT_SECONDS), _SILENT_BEATS * beat_s)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1
