# SPDX-License-Identifier: Apache-2.0
"""Jobs on three machines: the answers over a network that delays and loses, and what ends when a machine does."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import pytest
from architecture import Missing
from binding import WHERE
from hosts import Hosts
from machine import Result, Running

BIND = "--bind_cores_to_rank"
ANSWER = ("generate", "The history of computing", "--json", "-q", "--max-new-tokens", "3")
# Emulated processors take twenty times as long to end a rank, an ssh and Python.
DEADLINE = 45
# Ends once it is alone.
ELASTIC = """
import os, pathlib, time
pathlib.Path("/run/started").touch()
while os.environ["WORLD_SIZE"] != "1":
    time.sleep(0.2)
print("alone in round", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
# The rank of this number moves to a group of processes with 64 MiB, as that of a container, and takes more.
TAKES_MEMORY = """
import os, pathlib, time
if os.environ["RANK"] == "1":
    group = pathlib.Path("/sys/fs/cgroup/small")
    (group.parent / "cgroup.subtree_control").write_text("+memory")
    group.mkdir()
    (group / "memory.max").write_text("64M")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = [bytearray(1 << 20) for _ in range(256)]
time.sleep(600)
"""


@pytest.fixture(scope="module")
def _booted() -> Iterator[Hosts]:
    try:
        booted = Hosts(3)
    except Missing as lack:
        pytest.skip(str(lack))
    yield booted
    booted.close()


@pytest.fixture
def hosts(_booted: Hosts) -> Iterator[Hosts]:
    """Three machines; a test that leaves a process on one of them fails."""
    yield _booted
    left = {name: _booted.left(at, 20) for at, name in enumerate(_booted.names)}
    assert not any(left.values()), left


def wait_for_ranks(hosts: Hosts, job: Running, text: str) -> None:
    """Wait until each machine has a rank that runs."""
    until = time.monotonic() + 120
    for machine in hosts.machines:
        while machine.run(["pgrep", "-f", text]).status:
            assert time.monotonic() < until, "no rank has started"
            assert not job.done(), job.result()
            time.sleep(0.5)


def test_hosts_and_slots_of_a_list(hosts: Hosts) -> None:
    file = hosts.hostfile(1, 2, 2)
    for options, expected in (
        (("--include", "node1@node3:1"), ["node1", "node3"]),
        (("--exclude", "node1@node2:0"), ["node2", "node3", "node3"]),
    ):
        found = hosts.start("run", "--hostfile", file, BIND, *options, WHERE).result()
        assert found.status == 0, found
        lines = sorted(found.json_lines(), key=lambda line: int(line["env"]["RANK"]))
        assert [line["host"] for line in lines] == expected
        for host in set(expected):  # no two ranks of a machine have a core together
            cpus = [cpu for line in lines if line["host"] == host for cpu in line["cpus"]]
            assert len(cpus) == len(set(cpus)), lines


def test_an_answer_is_the_same_over_a_slow_network_that_loses_packets(hosts: Hosts) -> None:
    def answer(*words: str) -> list[int]:
        found = hosts.start(*ANSWER, *words).result()
        assert found.status == 0, found
        tokens: list[int] = json.loads(found.out)["tokens"]
        return tokens

    alone = answer()
    with hosts.disturbed("delay", "10ms", "3ms", "loss", "1%"):
        assert answer("--tp", "2", "--hostfile", hosts.hostfile(1, 1)) == alone
        assert answer("--pp", "2", "--hostfile", hosts.hostfile(1, 1)) == alone
    assert len(alone) == 3


@contextlib.contextmanager
def _paused(hosts: Hosts) -> Iterator[None]:
    hosts[1].monitor("stop")
    try:
        yield
    finally:
        hosts[1].monitor("cont")


@contextlib.contextmanager
def _cut_off(hosts: Hosts) -> Iterator[None]:
    hosts.cable(1, plugged=False)
    try:
        yield
        left = hosts.left(1, 20)  # its ranks end while nobody can reach it
    finally:
        hosts.cable(1, plugged=True)
    assert not left, left


@contextlib.contextmanager
def _reset(hosts: Hosts) -> Iterator[None]:
    hosts[1].reset()
    try:
        yield
    finally:
        hosts[1].wait_for_boot()
        hosts.connect(1)


HOW = (_paused, _cut_off, _reset)


def ended(job: Running) -> Result:
    """What a job says that must end within the deadline."""
    begin = time.monotonic()
    found = job.result()
    assert time.monotonic() - begin < DEADLINE, found
    assert "Traceback" not in found.err, found
    return found


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_a_machine_is_lost_while_a_job_runs(
    hosts: Hosts, how: Callable[[Hosts], contextlib.AbstractContextManager[None]]
) -> None:
    job = hosts.start("run", "--hostfile", hosts.hostfile(1, 1, 1), WHERE, "--sleep", "600")
    wait_for_ranks(hosts, job, "local_rank")
    with how(hosts):
        found = ended(job)
        assert found.status == 1, found
        assert "error: host node2: the connection to rank 1 was lost" in found.err, found
        for at in (0, 2):  # the ranks of the others are ended although one does not answer
            assert not hosts.left(at, 15)


def test_a_machine_is_lost_while_a_model_answers(hosts: Hosts) -> None:
    job = hosts.start(*ANSWER[:-1], "200", "--tp", "3", "--hostfile", hosts.hostfile(1, 1, 1))
    wait_for_ranks(hosts, job, "anyaccel.inference.ranks")
    with _cut_off(hosts):
        found = ended(job)
        assert found.status not in (0, None), found
        assert "node2" in found.err and "rank 1" in found.err, found


def test_an_elastic_job_goes_on_without_a_machine(hosts: Hosts) -> None:
    for machine in hosts.machines:
        machine.check(["sh", "-c", 'echo "$SCRIPT" > /run/elastic.py'], env={"SCRIPT": ELASTIC})
    options = ("--elastic", "1:2", "--max-restarts", "2", "--no_local_rank")
    job = hosts.start("run", "--hostfile", hosts.hostfile(1, 1), *options, "/run/elastic.py", seconds=600)
    until = time.monotonic() + 300
    for machine in hosts.machines[:2]:
        while machine.run(["test", "-e", "/run/started"]).status:
            assert time.monotonic() < until and not job.done(), "no worker has started"
            time.sleep(1)
    with _reset(hosts):
        found = job.result()
    assert found.status == 0, found
    assert "warning: host node2: the connection was lost" in found.err, found
    assert "ending workers that wait for a lost host" in found.err, found
    assert "alone in round 1" in found.out, found


def test_a_rank_runs_out_of_memory(hosts: Hosts) -> None:
    for machine in hosts.machines:
        machine.check(["sh", "-c", 'echo "$SCRIPT" > /run/takes_memory.py'], env={"SCRIPT": TAKES_MEMORY})
    begin = time.monotonic()
    found = hosts.start("run", "--hostfile", hosts.hostfile(1, 1, 1), "/run/takes_memory.py").result()
    assert time.monotonic() - begin < 2 * DEADLINE, found
    assert found.status == 128 + 9, found
    assert "error: rank 1 on host node2 (process " in found.err, found
    assert "was killed by SIGKILL; 2 other workers were ended" in found.err, found
    assert "the kernel does when memory runs out" in found.err, found
