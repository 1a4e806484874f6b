# SPDX-License-Identifier: Apache-2.0
"""Ranks that a command has started on hosts: how many, how they call back, what is said when they do not come."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks import command, on_hosts
from anyaccel.inference.ranks.control import RankError, Ranks
from anyaccel.launch.cluster import cluster as launching
from anyaccel.launch.cluster.cluster import ClusterOptions


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterOptions:
    hosts = tmp_path / "hosts"
    hosts.write_text("here slots=1\nthere slots=2\n")
    return ClusterOptions(hostfile=str(hosts))


def test_ranks_and_slots_have_to_be_as_many(cluster: ClusterOptions) -> None:
    with pytest.raises(UsageError, match=r"--tp 2 are 2 ranks, and the hosts of .* have 3 slots \(here 1, there 2\)"):
        command.start(Path("m"), ModelOptions(tp=2), None, cluster=cluster)  # type: ignore[arg-type]
    hosts = on_hosts.find_ranks(cluster, ModelOptions(tp=3))
    assert on_hosts.describe(hosts, None) == "hosts: here (rank 0), there (ranks 1-2), by ssh"


def test_a_launcher_that_starts_nothing_ends_the_wait(cluster: ClusterOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "run_cluster", lambda _options, _cluster: 3)
    with pytest.raises(RankError, match="no ranks were started") as raised:
        on_hosts.HostProcesses(cluster, on_hosts.find_ranks(cluster, ModelOptions(tp=3)))
    assert raised.value.exit_code == 3


def _rank_that_says(text: str, rank: int) -> None:
    os.environ["RANK"] = str(rank)
    channel = on_hosts.call_command()
    channel.receive()
    if text:
        channel.send(kind="error", text=text, exit_code=4, own=True, lost=False)
    try:
        while True:
            channel.receive()
    except EOFError:
        os._exit(0)


@pytest.mark.parametrize("bad", [0, 2])
def test_ranks_call_back_and_errors_name_their_host(
    cluster: ClusterOptions, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    def run_cluster(_options: object, given: ClusterOptions) -> int:
        name, _, value = given.exports[-1].partition("=")
        os.environ[name] = value
        children = []
        for rank in (2, 0, 1):
            child = os.fork()
            if child == 0:
                _rank_that_says("it has no such folder" if rank == bad else "", rank)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return 0

    monkeypatch.setattr(launching, "run_cluster", run_cluster)
    processes = on_hosts.HostProcesses(cluster, on_hosts.find_ranks(cluster, ModelOptions(tp=3)))
    try:
        host = "there" if bad else "here"
        ranks = Ranks(processes)
        ranks.send("options")
        with pytest.raises(RankError, match=f"^rank {bad} on {host}: it has no such folder$") as raised:
            ranks.next(60)
        assert raised.value.exit_code == 4
    finally:
        processes.end(60)
    assert processes.code() == 0


def test_ranks_that_do_not_start_are_named(cluster: ClusterOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cluster(_options: object, given: ClusterOptions) -> int:
        name, _, value = given.exports[-1].partition("=")
        os.environ[name] = value
        _rank_that_says("", 1)
        return 0

    monkeypatch.setattr(launching, "run_cluster", run_cluster)
    monkeypatch.setattr(on_hosts, "STARTING", 0.1)
    monkeypatch.setattr(on_hosts, "_SLICE_MS", 20.0)
    monkeypatch.setenv("ANYACCEL_COMM_TIMEOUT", "0.2")
    with pytest.raises(RankError, match=r"rank 0 on here, rank 2 on there did not start within 0.2 s of the others"):
        on_hosts.HostProcesses(cluster, on_hosts.find_ranks(cluster, ModelOptions(tp=3)))


def test_the_end_of_the_launcher_is_noticed_where_no_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of hosts that have lost their power."""
    from socket import socketpair

    from anyaccel.inference.ranks.channel import Channel

    near, far = socketpair()

    class Ended:
        def __init__(self) -> None:
            self.channels = [Channel(near.detach(), 60)]
            self.names = ["rank 0 on there"]

        def code(self) -> int:
            return 9

        def wait(self, _seconds: float) -> int:
            return 9

    ended = Ended()
    monkeypatch.setattr("anyaccel.inference.ranks.control._SLICE", 0.01)
    start = time.monotonic()
    with pytest.raises(RankError, match="the ranks have ended with code 9"):
        Ranks(ended).next(3600)  # type: ignore[arg-type]
    assert time.monotonic() - start < 1800
    ended.channels[0].close()
    far.close()


def test_a_rank_that_nobody_calls_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(on_hosts.CONTACT, raising=False)
    with pytest.raises(AnyAccelError, match="--hostfile` starts this"):
        on_hosts.call_command()
