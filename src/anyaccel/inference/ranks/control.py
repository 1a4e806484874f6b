# SPDX-License-Identifier: Apache-2.0
"""Controls the ranks that a process has started: loading, messages, and errors."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from anyaccel import env
from anyaccel.errors import AnyAccelError, CommTimeoutError, UsageError
from anyaccel.inference.native.loading_watch import LoadingWatch
from anyaccel.inference.ranks.processes import Processes

if TYPE_CHECKING:
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import Reporter
    from anyaccel.launch import LaunchPlan

# Seconds in which ranks report errors or end by themselves, and in which the launcher notices that a rank has ended.
EXIT_GRACE = 0.5
_NOTICE = 5.0
_SLICE = 1.0  # seconds of one poll() of a longer wait
# A step may take _LEAST_S plus _TIMES its expected time. _TOKEN_S is the expected time of a token before the first
# step: enough for 70 billion parameters at 28 GFLOP/s.
_LEAST_S = 60.0
_TIMES = 20.0
_TOKEN_S = 0.25
# The same for a step that counts as late: it may still end, but requests should go elsewhere if possible.
_LATE_LEAST_S = 5.0
_LATE_TIMES = 4.0


class RankError(AnyAccelError):
    """An error of a rank, after which the ranks cannot be used any more.

    Args:
        exit_code: the exit code of the command.
    """

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def plan_ranks(options: ModelOptions, replica: int = 0, replicas: int = 1) -> tuple[LaunchPlan, str]:
    """The plan for a model's ranks on this machine, and a description of machine and plan.

    Args:
        replica: number of this replica among `replicas`, which have a NUMA node each if there are as many nodes, else
            equal parts of the machine.

    Raises:
        UsageError: there are too few CPUs.
    """
    from anyaccel import launch
    from anyaccel.launch.plan.plan import HostPlace
    from anyaccel.launch.plan.planning import free_port
    from anyaccel.topology import read_machine

    whole = machine = read_machine()
    count, most = options.ranks, len(machine.allowed_cpus)
    if count * replicas > most:
        if replicas > 1:
            raise UsageError(
                f"--replicas {replicas} {options.rank_options}: this process may use {most} CPUs only, and each of "
                "their ranks needs one"
            )
        raise UsageError(
            f"{options.rank_options}: this process may use {most} CPUs only, and each rank needs one; "
            + (f"{most} ranks are" if options.pp > 1 else f"--tp {most} is")
            + " the most here"
        )
    wanted = launch.LaunchOptions(
        script="anyaccel",
        module=True,
        num_accelerators=count,
        master_port=free_port(),
        # With more ranks than cores, ranks would have to share a core, so they are not bound.
        bind_cores=count * replicas <= len(machine.cores()),
        local_rank_argument=False,
    )
    place = HostPlace(world_size=count, ahead=replica * count, behind=(replicas - replica - 1) * count)
    nodes = list(machine.nodes_with_cores().values())
    if replicas == len(nodes) and all(len(cores) >= count for cores in nodes):
        # Each replica gets all cores of a node, even if nodes differ, as replicas do not wait for each other.
        own = {thread for core in nodes[replica] for thread in core.siblings or (core.id,)}
        machine = replace(machine, allowed_cpus=tuple(cpu for cpu in machine.allowed_cpus if cpu in own))
        place = HostPlace()
    plan = launch.make_plan(wanted, machine, place=place)
    return plan, f"topology: {whole.summary()}\n{plan.render()}"


class StepDeadline:
    """Derives deadlines from the longest step so far, in proportion for a step with more tokens than any before it."""

    def __init__(self) -> None:
        self._longest_s = _TOKEN_S
        self._most = 1
        self._late_from = float("inf")

    def seconds(self, tokens: int) -> float:
        """The seconds after which a step of so many tokens counts as hanging."""
        return _LEAST_S + _TIMES * self._expected(tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a step that has ended."""
        self._longest_s = max(self._longest_s, seconds)
        self._most = max(self._most, tokens)

    @contextmanager
    def step(self, tokens: int) -> Iterator[float]:
        """A context for waiting for a step; yields its deadline in seconds. A step that fails stays late."""
        start = time.monotonic()
        self._late_from = start + _LATE_LEAST_S + _LATE_TIMES * self._expected(tokens)
        yield self.seconds(tokens)
        self._late_from = float("inf")
        self.took(tokens, time.monotonic() - start)

    def late(self) -> bool:
        """Whether the step under way takes much longer than those before it; may be called in any thread."""
        return time.monotonic() > self._late_from

    def _expected(self, tokens: int) -> float:
        return self._longest_s * max(1.0, tokens / self._most)


class Ranks:
    """The ranks, as seen by the process that has started them.

    Args:
        uninterrupted: makes a context in which Ctrl-C is deferred, so that whole messages are read.
    """

    def __init__(
        self, processes: Processes, uninterrupted: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.processes = processes
        self.channels = processes.channels
        self.timeout = env.ANYACCEL_COMM_TIMEOUT.get()
        self.steps = StepDeadline()
        self._uninterrupted = uninterrupted

    def send(self, kind: str, **message: Any) -> None:
        try:
            for channel in self.channels:
                channel.send(kind=kind, **message)
        except (BrokenPipeError, ConnectionResetError):
            raise self.lost() from None

    def next(self, timeout: float | None = None, watch: LoadingWatch | None = None) -> tuple[int, dict[str, Any]]:
        """The next message of any rank, with the rank.

        Args:
            timeout: seconds to wait; None: no limit, as the ranks have deadlines among themselves.
            watch: tells of ranks that load which of them hangs.

        Raises:
            RankError: a rank has failed or died, or hangs while it loads.
            CommTimeoutError: no message has come in time.
        """
        while True:
            for rank, channel in enumerate(self.channels):
                message = channel.next()
                if message is not None:
                    if message["kind"] == "error":
                        self._fail(rank, message)
                    return rank, message
            self._wait(timeout, watch)

    def outcome(self, tokens: int, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds, after a step of so many tokens.

        Raises:
            RankError: a rank has failed, died, or hangs. Closing the processes then kills those that do not end.
        """
        with self.steps.step(tokens) as seconds:
            try:
                while (message := self.next(seconds)[1])["kind"] not in kinds:
                    pass
            except CommTimeoutError:
                raise RankError(f"a rank hangs: no step has ended within {seconds:.0f} s; is it stopped?") from None
        return message

    def _wait(self, timeout: float | None, watch: LoadingWatch | None = None) -> None:
        poller = select.poll()
        for channel in self.channels:
            poller.register(channel.descriptor, select.POLLIN)
        ready: set[int] = set()
        left = float("inf") if timeout is None else timeout
        slice_s = _SLICE if watch is None else min(_SLICE, self.timeout / 4)
        # In slices, so that only time in which the ranks could run counts: if a container with this process and the
        # ranks is paused for hours, they lose one slice. It also notices the end of the launcher, as a host that is
        # gone does not close its connections.
        while not ready and left > 0:
            own = min(left, slice_s)
            start = time.monotonic()
            ready = {descriptor for descriptor, _ in poller.poll(own * 1000)}
            left -= own
            if not ready and self.processes.code() is not None:
                raise self.lost()
            if watch is not None:
                self._pump(ready)
                self._look(watch, min(own, time.monotonic() - start))
                return
        if not ready:
            raise CommTimeoutError(f"no rank has said anything for {timeout:g} s (ANYACCEL_COMM_TIMEOUT)")
        self._pump(ready)

    def _look(self, watch: LoadingWatch, seconds: float) -> None:
        """Raise a RankError if a rank that loads hangs; `seconds` have passed since the last look."""
        channels = self.channels
        problem = watch.passed(seconds, [each.heard for each in channels], [each.worked for each in channels])
        for channel in channels:
            channel.heard = channel.worked = False
        if problem:
            raise RankError(problem)

    def _pump(self, ready: set[int]) -> None:
        """Read what has come."""
        try:
            with self._uninterrupted():
                for channel in self.channels:
                    if channel.descriptor in ready:
                        channel.pump()
        except EOFError:
            self._fail(-1, {})  # a rank has ended, and messages of the others may tell why

    def lost(self) -> RankError:
        """The error for ranks that have ended, after the launcher has reported why."""
        code = self.processes.wait(_NOTICE)
        how = "" if code is None else f" with code {code}"
        return RankError(f"the ranks have ended{how}; the messages above say why", code or 1)

    def _fail(self, rank: int, message: dict[str, Any]) -> NoReturn:
        """Raise the error of the rank that has failed, not one that only reports the failure of another rank."""
        errors = {rank: message} if message else {}
        deadline = time.monotonic() + EXIT_GRACE
        channels = dict(enumerate(self.channels))
        while len(errors) < len(self.channels) and time.monotonic() < deadline and channels:
            for other, channel in list(channels.items()):
                try:
                    channel.pump()
                except EOFError:
                    del channels[other]
                while (late := channel.next()) is not None:
                    if late["kind"] == "error":
                        errors.setdefault(other, late)
            time.sleep(0.005)
        own = {rank: each for rank, each in errors.items() if each["own"] and not each["lost"]}
        if not own and self.processes.wait(_NOTICE) is not None:
            raise self.lost()
        if not errors:
            raise RankError("a rank does not answer any more; run the command again")
        chosen = own or errors
        first = min(chosen)
        text = chosen[first]["text"]
        same_on_all = len(chosen) == len(self.channels) and len({each["text"] for each in chosen.values()}) == 1
        where = "" if same_on_all or not chosen[first]["own"] else f"{self.processes.names[first]}: "
        raise RankError(where + text, chosen[first]["exit_code"])

    def load(self, path: Path, options: ModelOptions, summary: str) -> None:
        """Make the ranks start to load; `summary` describes machine and plan, for the screen."""
        self.send("options", model=str(path), options=asdict(options), summary=summary)

    def loaded(self, screen: Reporter) -> list[dict[str, Any]]:
        """Show the ranks' progress, pass on what they exchange, and return the "ready" message of each.

        Raises:
            AnyAccelError: a rank has failed.
        """
        exchanged: dict[int, Any] = {}
        ready: dict[int, dict[str, Any]] = {}
        done: dict[int, tuple[int, int]] = {}
        watch = LoadingWatch(self.processes.names, self.timeout)
        while len(ready) < len(self.channels):
            rank, message = self.next(watch=watch)
            what = message["kind"]
            if what == "line":
                screen.line(message["text"])
            elif what == "progress":
                before = done.get(rank)
                done[rank] = message["done"], message["total"]
                if len(done) == len(self.channels) and done[rank] != before:
                    screen.progress(*(sum(numbers) for numbers in zip(*done.values(), strict=True)))
            elif what == "exchange":
                exchanged[rank] = message["value"]
                watch.waits(rank)
                if len(exchanged) == len(self.channels):
                    self.send("exchanged", values=[exchanged[each] for each in sorted(exchanged)])
                    exchanged.clear()
                    watch.resume()
            elif what == "ready":
                ready[rank] = message
                watch.loaded(rank)
        return [ready[rank] for rank in sorted(ready)]
