# SPDX-License-Identifier: Apache-2.0
"""`anyaccel generate` and `chat` with workers on the hosts of a hostfile, and what is said when that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster_hosts import Hosts

from waiting import wait_for

PROMPT = "Name the largest planet."
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"ANYACCEL_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "ANYACCEL_COMM_TIMEOUT": "20"}


def start(hosts: Hosts, variables: dict[str, str], *words: object) -> subprocess.Popen[str]:
    """A command on the first host."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "anyaccel", *map(str, words)]
    child: subprocess.Popen[str] = hosts[0].popen(
        command, text=True, env=hosts.environment("ssh", **variables), **pipes
    )
    return child


def run(hosts: Hosts, variables: dict[str, str], *words: object, text: str = "") -> subprocess.CompletedProcess[str]:
    with start(hosts, variables, *words) as child:
        try:
            output, errors = child.communicate(text, timeout=400)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def answer(hosts: Hosts, variables: dict[str, str], *words: object) -> dict[str, Any]:
    done = run(hosts, variables, "generate", PROMPT, "--json", "--max-new-tokens", 12, *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hosts_answer_as_one_does(hosts: Hosts, tmp_path: Path, cache: dict[str, str]) -> None:
    file = hosts.hostfile(tmp_path)
    found = answer(hosts, cache, "--tp", 2, "--hostfile", file)
    assert found["runtime"] == "native"
    assert found["tokens"] == answer(hosts, cache, "--tp", 2)["tokens"]
    found = answer(hosts, cache, "--pp", 2, "--draft", "ngram:3", "--hostfile", file)
    assert found["runtime"] == "native"
    assert found["tokens"] == answer(hosts, cache)["tokens"]
    done = run(
        hosts, cache, "chat", "-q", "--tp", 2, "--hostfile", file, "--max-new-tokens", 4, text=f"{PROMPT}\nWhy?\n"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_a_model_that_a_host_lacks_is_said_with_the_host(hosts: Hosts, tmp_path: Path, cache: dict[str, str]) -> None:
    from anyaccel.inference.checkpoints.model_path import default_model_file

    only_here = Path("/run/model.gguf")  # each host has a /run of its own
    hosts[0].run(["ln", "-s", default_model_file(), only_here])
    file = hosts.hostfile(tmp_path)
    done = run(hosts, cache, "generate", PROMPT, "--tp", 2, "--hostfile", file, "--model", only_here)
    assert done.returncode != 0
    assert "rank 1 on node2" in done.stderr and str(only_here) in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, tmp_path: Path, cache: dict[str, str]) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=1\nnothere slots=1\n")
    done = run(hosts, cache, "generate", PROMPT, "--tp", 2, "--hostfile", file)
    assert done.returncode != 0
    assert "nothere" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("divided", ["--tp", "--pp"])
@pytest.mark.parametrize("how", ["Ctrl-C", "killed", "cut off", "stopped"])
def test_the_end_of_a_job_leaves_nothing_anywhere(
    hosts: Hosts, tmp_path: Path, cache: dict[str, str], how: str, divided: str
) -> None:
    file = hosts.hostfile(tmp_path)
    words = (divided, 2, "--hostfile", file, "--max-new-tokens", 4000, "--no-chat-template", "--temperature", 1)
    child = start(hosts, cache, "generate", PROMPT, *words)
    try:
        assert child.stdout
        begun = child.stdout.read(20)
        assert begun
        if how == "Ctrl-C":
            os.kill(child.pid, signal.SIGINT)
        elif how in ("killed", "stopped"):
            wait_for(lambda: bool(ranks_on(hosts, "node2")), "a rank on node2", 10)
            os.kill(ranks_on(hosts, "node2")[0], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        else:
            hosts[1].disconnect()
        _, errors = child.communicate(timeout=100)
    finally:
        hosts[1].reconnect()
        child.kill()
        child.communicate()
    assert child.returncode != 0
    assert "Traceback" not in errors
    if how != "Ctrl-C":
        assert "node2" in errors, errors
    assert not hosts.wait_idle(30)


def test_a_rank_that_stops_while_a_prompt_is_read_is_named(hosts: Hosts, tmp_path: Path, cache: dict[str, str]) -> None:
    """With ranks that share memory and stages on two hosts: one that is not its host's first, which talks for it."""
    file = hosts.hostfile(tmp_path, slots=2)
    words = ("--tp", 2, "--pp", 2, "--hostfile", file, "--no-chat-template", "--max-new-tokens", 1)
    child = start(hosts, cache, "generate", f"{PROMPT} " * 1500, *words)
    try:
        wait_for(lambda: len(ranks_on(hosts, "node2")) == 2, "two ranks on node2", 60)
        _, second = sorted(ranks_on(hosts, "node2"))
        assert child.stderr
        while "loading" not in (line := child.stderr.readline()):
            assert line, "it has ended"
        loaded = cpu_seconds(second)
        wait_for(lambda: cpu_seconds(second) > loaded + 0.5, "the prompt is read", 60)
        os.kill(second, signal.SIGSTOP)
        _, errors = child.communicate(timeout=100)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 1
    assert "rank 3" in errors and "node2" in errors and "within the timeout of 20 s" in errors, errors
    assert "Traceback" not in errors
    assert not hosts.wait_idle(30)
    for host in hosts.cluster:
        assert host.run(["ls", "/dev/shm"]).stdout.split() == []


@pytest.mark.parametrize(
    ("how", "place"),
    [("stopped", "node1"), ("killed", "node1"), ("stopped", "node2"), ("killed", "node2"), ("cut off", "node2")],
)
def test_a_rank_that_is_lost_while_it_loads_is_named(
    hosts: Hosts, tmp_path: Path, cache: dict[str, str], how: str, place: str
) -> None:
    """Rank 1, on the machine of the command or on another one."""
    words = () if place == "node1" else ("--hostfile", hosts.hostfile(tmp_path))
    child = start(hosts, cache | PACKS, "generate", PROMPT, "--tp", 2, "--max-new-tokens", 4, *words)
    try:
        rank = in_load(hosts, place)
        begun = time.monotonic()
        if how == "cut off":
            hosts[1].disconnect()
        else:
            os.kill(rank, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        _, errors = child.communicate(timeout=60)
        took = time.monotonic() - begun
    finally:
        hosts[1].reconnect()
        child.kill()
        child.communicate()
    assert child.returncode != 0
    assert "Traceback" not in errors
    assert "rank 1" in errors or (place == "node2" and place in errors), errors
    if how == "stopped":
        assert "has not been heard of for 20 s" in errors, errors
    assert took < (30 if how == "stopped" else 15), f"{took:.1f} s\n{errors}"
    assert not hosts.wait_idle(30)


def test_a_load_that_takes_longer_than_the_deadline_goes_on(
    hosts: Hosts, tmp_path: Path, cache: dict[str, str]
) -> None:
    """As on a host with hardly any processor time, or with a slow file system: a rank runs for 1 % of the time."""
    words = ("--tp", 2, "--hostfile", hosts.hostfile(tmp_path), "--max-new-tokens", 4)
    child = start(hosts, cache | PACKS | {"ANYACCEL_COMM_TIMEOUT": "4"}, "generate", PROMPT, *words)
    try:
        rank = in_load(hosts, "node2")
        end = time.monotonic() + 14
        while time.monotonic() < end:
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.495)
            os.kill(rank, signal.SIGCONT)
            time.sleep(0.005)
        assert loads(rank)
        output, errors = child.communicate(timeout=100)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == 0, errors
    assert output


# Weights are packed, so that loading takes a second or more.
PACKS = {"ANYACCEL_PACKED_CACHE_BYTES": "0"}


def in_load(hosts: Hosts, place: str) -> int:
    """The process id of rank 1, once it loads."""
    ranks = 2 if place == "node1" else 1
    wait_for(lambda: len(ranks_on(hosts, place)) == ranks, f"{ranks} ranks on {place}", 60)
    rank = sorted(ranks_on(hosts, place))[-1]
    wait_for(lambda: loads(rank), "the rank loads", 60)
    return rank


def loads(rank: int) -> bool:
    """Whether a process has mapped the file of the model's weights."""
    return ".gguf" in Path(f"/proc/{rank}/maps").read_text()


def ranks_on(hosts: Hosts, name: str) -> list[int]:
    """Process ids of the ranks on a host."""
    found = hosts.cluster.processes().get(name, {})
    return [pid for pid, command in found.items() if "inference.ranks.rank" in command and "launch" not in command]


def cpu_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
