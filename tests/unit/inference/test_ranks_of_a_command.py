# SPDX-License-Identifier: Apache-2.0
"""The messages between a command and its ranks, and where ranks stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from anyaccel.errors import CommTimeoutError, UsageError
from anyaccel.inference.generate import Generation, SamplingOptions
from anyaccel.inference.native.loading_watch import LoadingWatch
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks import command
from anyaccel.inference.ranks import rank as rank_process
from anyaccel.inference.ranks.channel import Channel
from anyaccel.inference.ranks.control import RankError, Ranks, StepDeadline
from anyaccel.topology import read_machine
from waiting import wait_for


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(end.detach(), 1.0) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_messages_of_any_size_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    long = list(range(500_000))  # far more than a socket holds
    sender = threading.Thread(target=lambda: [here.send(kind="a", ids=long), here.send(kind="b", text="ü\n")])
    sender.start()
    assert there.receive(10) == {"kind": "a", "ids": long}
    assert there.receive(10) == {"kind": "b", "text": "ü\n"}
    sender.join()
    assert there.next() is None


def test_waits_end(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    with pytest.raises(CommTimeoutError, match="says nothing"):
        there.receive(0.05)
    with pytest.raises(CommTimeoutError, match="does not read"):
        here.send(ids=list(range(1_000_000)))
    here.close()
    with pytest.raises(EOFError):
        while True:
            there.receive(1)


class Counting:
    """A backend that says 0, 1, 2, ..., as many as are asked for."""

    runtime, accelerator, context, vocabulary = "native", "cpu", 0, 10

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.steps = 0

    def tokens(self, ids: list[int], wanted: int, how: Any, result: Any) -> Generator[int, None, None]:
        for token in range(wanted):
            self.steps += 1
            yield token


@pytest.fixture
def two() -> Iterator[tuple[list[Channel], list[Counting]]]:
    """The command's ends and the backends of two ranks that serve in threads."""
    near, backends, threads, far = [], [], [], []
    for rank in range(2):
        one, other = socket.socketpair()
        near.append(Channel(one.detach(), 5.0))
        far.append(Channel(other.detach(), 5.0))
        backends.append(Counting())

        def serve(rank: int = rank) -> None:
            with pytest.raises(EOFError):
                rank_process._serve(far[rank], rank, backends[rank])  # type: ignore[arg-type]

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        assert near[-1].receive(5)["kind"] == "ready"
    yield near, backends
    for channel in near:
        channel.close()
    for thread in threads:
        thread.join(5)
    for channel in far:
        channel.close()


def ask(channels: list[Channel], wanted: int, limit: int) -> None:
    for channel in channels:
        channel.send(kind="generate", ids=[1], max_new_tokens=wanted, sampling={}, ends=[], limit=limit)


def answer(channel: Channel) -> tuple[list[int], str]:
    tokens = []
    while (message := channel.receive(60))["kind"] == "token":
        tokens.append(message["token"])
    return tokens, message["kind"]


def settled(backends: list[Counting], steps: int) -> bool:
    deadline = time.monotonic() + 60
    while [backend.steps for backend in backends] != [steps] * 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return [backend.steps for backend in backends] == [steps] * 2


def test_ranks_stop_at_the_highest_step_that_any_was_allowed(two: tuple[list[Channel], list[Counting]]) -> None:
    near, backends = two
    ask(near, 100, 2)
    assert settled(backends, 2)
    near[1].send(kind="limit", limit=3)  # Ctrl-C came before rank 0 was told
    for channel in near:
        channel.send(kind="stop", limit=3)
    assert answer(near[0]) == ([0, 1, 2], "stopped")
    assert settled(backends, 3)
    ask(near, 4, 10)  # what was meant for the first answer does nothing to the second
    assert answer(near[0]) == ([0, 1, 2, 3], "done")
    assert settled(backends, 7)


def test_a_stop_that_comes_too_late_is_answered(two: tuple[list[Channel], list[Counting]]) -> None:
    near, backends = two
    ask(near, 3, 2)
    for channel in near:
        channel.send(kind="limit", limit=3)
    assert answer(near[0]) == ([0, 1, 2], "done")
    for channel in near:
        channel.send(kind="stop", limit=3)
    assert answer(near[0]) == ([], "stopped")
    assert settled(backends, 3)


class Stopped:
    """In place of RankProcesses: ranks that are there, and say nothing."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.channels = [Channel(near.detach(), 60) for near, _ in pairs]
        self.peers = [far for _, far in pairs]

    def code(self) -> None:
        return None

    def end(self, _timeout: float) -> None:
        for end in (*self.channels, *self.peers):
            end.close()


@pytest.mark.parametrize("said", [[], ['{"kind": "token", "token": 3}']])
def test_ranks_that_are_stopped_are_not_waited_for(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Stopped()
    backend = command.RanksBackend(processes, keep_on_interrupt=True)  # type: ignore[arg-type]
    try:
        backend.vocabulary, backend.context, backend.ends, backend.tokenizer = 10, 0, [], None
        for line in said:
            processes.peers[0].sendall(line.encode() + b"\n")
        monkeypatch.setattr(StepDeadline, "seconds", lambda _self, _tokens: 0.01)
        result = Generation()
        with pytest.raises(RankError, match="a rank hangs: no step has ended within 0 s; is it stopped"):
            list(backend.tokens([1, 2], 8, SamplingOptions(), result))
        assert result.tokens == [3] * len(said)
    finally:
        backend.close()


def test_more_ranks_than_cpus_are_refused_with_the_number_that_would_do() -> None:
    count = len(read_machine().allowed_cpus)
    with pytest.raises(UsageError, match=f"may use {count} CPUs only, and each rank needs one; --tp {count} is"):
        command.start(Path("m"), ModelOptions(tp=count + 1), None)  # type: ignore[arg-type]


_LOADS = """
import sys, threading, time
from anyaccel import _native
beats = _native.Heartbeat(int(sys.argv[1]), 0.02)
if sys.argv[2] == "works":
    end = time.monotonic() + 30
    while time.monotonic() < end:
        sum(range(1000))
threading.Event().wait(30)
"""


class One:
    """In place of RankProcesses: one rank."""

    def __init__(self, descriptor: int) -> None:
        self.channels = [Channel(descriptor, 5)]
        self.names = ["one"]

    def code(self) -> None:
        return None


@pytest.mark.parametrize("how", ["works", "waits", "stops"])
def test_a_rank_that_loads_slowly_is_told_from_one_that_hangs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the heartbeat of a real process."""
    near, far = socket.socketpair()
    ranks = Ranks(One(near.detach()))  # type: ignore[arg-type]
    channel = ranks.channels[0]
    with subprocess.Popen([sys.executable, "-c", _LOADS, str(far.fileno()), how], pass_fds=[far.fileno()]) as child:
        far.close()
        try:
            wait_for(channel.pump, "the first beat")
            if how == "works":
                wait_for(lambda: channel.pump() and channel.worked, "a beat that tells of work")
            elif how == "waits":
                ranks.timeout = 60
                monkeypatch.setattr("anyaccel.inference.native.loading_watch._IDLE_TIMES", 0.005)
                with pytest.raises(RankError, match=r"one has neither read nor computed anything for 0.3 s while"):
                    ranks.loaded(None)  # type: ignore[arg-type]
            else:
                ranks.timeout = 0.2
                child.send_signal(signal.SIGSTOP)
                with pytest.raises(RankError, match=r"one has not been heard of for 0.2 s while the model is loaded"):
                    ranks.loaded(None)  # type: ignore[arg-type]
        finally:
            child.kill()
            channel.close()


def test_a_rank_that_waits_for_others_need_not_work_and_one_that_starts_need_not_be_heard() -> None:
    watch = LoadingWatch(["a", "b"], 10)
    assert not watch.passed(15, [False, True], [False, False])  # a starts Python
    assert not watch.passed(9, [True, True], [True, True])
    watch.waits(0)
    assert not watch.passed(14, [True, True], [True, False])  # what a does while it waits does not count
    assert watch.passed(2, [True, True], [True, False]).startswith("b has neither")
    assert not watch.passed(9, [False, True], [False, True])
    assert watch.passed(2, [False, True], [False, True]).startswith("a has not been heard of")
    watch.loaded(0)
    assert not watch.passed(60, [False, True], [False, True])
    assert LoadingWatch(["a"], 10).passed(61, [False], [False]).startswith("a has not started")


def test_beats_within_a_message_are_no_part_of_it(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    for part in (b"\0", b'{"kind": "li\1', b'ne"}\n\0'):
        os.write(here.descriptor, part)
    assert there.receive(5) == {"kind": "line"}
    assert there.worked
