# SPDX-License-Identifier: Apache-2.0
"""One model over the ranks of several hosts, natively: the embedded one, through `anyaccel run`."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_hosts import Hosts, lines

from collective_cases import oneccl_folder
from waiting import wait_for

# How far logits are from those of fp32 on the wire, as a share of their spread.
WIRE_ERRORS = {"bf16": 0.03, "int8": 0.1}
GENERATING = Path(__file__).parent / "generating.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cache of models that the tests share, as hosts share a file system."""
    yield {"ANYACCEL_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


def answers(
    hosts: Hosts, folder: Path, slots: list[int], cache: dict[str, str], *words: object, launcher: str = "ssh"
) -> list[dict[str, Any]]:
    file = hosts.hostfile(folder, slots=slots, hosts=len(slots))
    bind = ["--bind_cores_to_rank"] if max(slots) <= (os.cpu_count() or 1) else []
    done = hosts.run(launcher, file, *bind, GENERATING, *words, timeout=400, variables=cache)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "native runtime has no" not in done.stderr
    return lines(done.stdout)


@pytest.mark.parametrize("slots", [[1, 1], [2, 2]], ids=str)
def test_hosts_answer_as_one_host_does(hosts: Hosts, tmp_path: Path, slots: list[int], cache: dict[str, str]) -> None:
    (expected, *_) = answers(hosts, tmp_path, [sum(slots)], cache)
    found = answers(hosts, tmp_path, slots, cache)
    assert [line["host"] for line in found] == [f"node{n + 1}" for n, count in enumerate(slots) for _ in range(count)]
    for line in found:
        assert line["runtime"] == "native"
        for what in ("greedy", "sampled", "logits"):
            assert line[what] == expected[what], what


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_fewer_bytes_between_hosts(hosts: Hosts, tmp_path: Path, wire: str, cache: dict[str, str]) -> None:
    """All ranks have the same bits, near those of fp32, and nearly always the same tokens."""
    (expected, *_) = answers(hosts, tmp_path, [1, 1], cache)
    found = answers(hosts, tmp_path, [1, 1], cache | {"ANYACCEL_WIRE_DTYPE": wire})
    for what in ("greedy", "sampled", "logits"):
        assert found[0][what] == found[1][what], what
    assert found[0]["logits"] != expected["logits"]
    pairs = list(zip(found[0]["some_logits"], expected["some_logits"], strict=True))
    spread = statistics.pstdev(value for _, value in pairs)
    assert statistics.fmean(abs(a - b) for a, b in pairs) < WIRE_ERRORS[wire] * spread
    tokens = list(zip(found[0]["greedy"][0], expected["greedy"][0], strict=True))
    assert sum(a == b for a, b in tokens) >= len(tokens) // 2


@pytest.mark.parametrize(
    ("between", "launcher", "slots"),
    [("mpi", "impi", [2, 2]), ("mpi", "mpich", [1, 1]), ("mpi", "openmpi", [1, 1]), ("ccl", "ssh", [1, 1])],
)
def test_a_library_between_hosts_brings_the_same_bits(
    hosts: Hosts, tmp_path: Path, between: str, launcher: str, slots: list[int], cache: dict[str, str]
) -> None:
    variables = cache | {"ANYACCEL_BETWEEN_HOSTS": between, "ANYACCEL_COMM_TIMEOUT": "60"}
    if between == "ccl":
        folder = oneccl_folder()
        if folder is None:
            pytest.skip("no oneCCL: tools/install_test_tools.sh brings it")
        variables["CCL_ROOT"] = str(folder)
    (expected, *_) = answers(hosts, tmp_path, slots, cache)
    found = answers(hosts, tmp_path, slots, variables, launcher=launcher)
    assert len(found) == sum(slots)
    for line in found:
        for what in ("greedy", "sampled", "logits"):
            assert line[what] == expected[what], what


def test_mpi_without_mpirun_says_what_is_missing(hosts: Hosts, tmp_path: Path, cache: dict[str, str]) -> None:
    file = hosts.hostfile(tmp_path)
    done = hosts.run("ssh", file, GENERATING, timeout=200, variables=cache | {"ANYACCEL_BETWEEN_HOSTS": "mpi"})
    assert done.returncode != 0
    assert "no mpirun has started this process; use --launcher" in done.stderr, done.stderr[-2000:]


def test_a_rank_that_dies_ends_a_job_over_mpi(hosts: Hosts, tmp_path: Path, cache: dict[str, str]) -> None:
    variables = cache | {"ANYACCEL_BETWEEN_HOSTS": "mpi", "ANYACCEL_COMM_TIMEOUT": "60"}
    file = hosts.hostfile(tmp_path)
    begin = time.monotonic()
    done = hosts.run("impi", file, GENERATING, "--die", 1, timeout=120, variables=variables)
    assert done.returncode != 0
    assert "rank 1" in done.stderr and "node2" in done.stderr, done.stderr[-3000:]
    assert time.monotonic() - begin < 100
    assert not hosts.wait_idle(20)


@pytest.mark.parametrize(("slots", "pp"), [([1, 1], 2), ([2, 2], 2), ([1, 1, 1], 3)], ids=str)
def test_stages_on_hosts_answer_as_one_process(
    hosts: Hosts, tmp_path: Path, slots: list[int], pp: int, cache: dict[str, str]
) -> None:
    """A batch and a prompt that pass in several parts; with one rank a stage, logits have the bits of one process."""
    words = ("--batch", 3, "--prompt", 70)
    (expected, *_) = answers(hosts, tmp_path, [sum(slots) // pp], cache, *words)
    found = answers(hosts, tmp_path, slots, cache, *words, "--pp", pp)
    assert len(found) == sum(slots)
    for line in found:
        for what in ("greedy", "sampled", "logits"):
            assert line[what] == expected[what], what


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("how", ["killed", "cut off", "stopped"])
def test_a_host_that_is_lost_is_named(hosts: Hosts, tmp_path: Path, how: str, pp: int, cache: dict[str, str]) -> None:
    """Without a launcher, which would end the job by itself: the ranks have to notice."""
    children = []
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = hosts.environment("ssh", **cache) | {
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29611",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "1",
        "ANYACCEL_COMM_TIMEOUT": "20",
    }
    for rank in range(2):
        command = [sys.executable, str(GENERATING), "--rounds", "100000", "--warm", str(tmp_path), "--pp", str(pp)]
        environment["RANK"] = str(rank)
        children.append(hosts[rank].popen(command, text=True, env=dict(environment), **pipes))
    try:
        wait_for(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)), "both ranks answer", 300)
        if how == "killed":
            os.kill(children[1].pid, signal.SIGKILL)
        elif how == "stopped":
            os.kill(children[1].pid, signal.SIGSTOP)
        else:
            hosts[1].disconnect()
        errors = [children[0].communicate(timeout=100)[1]]
        if how == "stopped":
            os.kill(children[1].pid, signal.SIGCONT)
        errors.append(children[1].communicate(timeout=100)[1])
    finally:
        hosts[1].reconnect()
        for child in children:
            child.kill()
            child.communicate()
    assert "rank 1 on node2" in errors[0]
    assert children[0].returncode == 1
    if how == "killed":
        assert "PeerLostError" in errors[0]
    else:
        assert "CommTimeoutError" in errors[0]
        said = (
            "rank 0 on node1 gave up" if how == "stopped" else "rank 0 on node1 did not come within the timeout of 20 s"
        )
        assert said in errors[1]
    for host in hosts.cluster:
        assert host.run(["ls", "/dev/shm"]).stdout.split() == []


@pytest.mark.parametrize("how", ["stopped", "killed", "cut off"])
@pytest.mark.parametrize("phase", ["loads", "answers"])
def test_a_rank_of_a_script_that_is_lost_is_named(
    hosts: Hosts, tmp_path: Path, how: str, phase: str, cache: dict[str, str]
) -> None:
    """Through `anyaccel run`, as `anyaccel generate --hostfile` names it; nothing is left anywhere."""
    file = hosts.hostfile(tmp_path)
    variables = cache | {"ANYACCEL_COMM_TIMEOUT": "10"}
    if phase == "loads":
        variables["ANYACCEL_PACKED_CACHE_BYTES"] = "0"  # so that loading takes a second or more
    words = ("--bind_cores_to_rank", GENERATING, "--rounds", "100000", "--warm", tmp_path)
    child = hosts.start("ssh", file, *words, variables=variables)
    try:
        if phase == "loads":
            wait_for(lambda: bool(loading_on(hosts, "node2")), "rank 1 loads", 100)
            victim = loading_on(hosts, "node2")[0]
        else:
            wait_for(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(2)), "both ranks answer", 100)
            victim = int((tmp_path / "rank1").read_text())
        begin = time.monotonic()
        if how == "cut off":
            hosts[1].disconnect()
        else:
            os.kill(victim, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        _, errors = child.communicate(timeout=100)
        took = time.monotonic() - begin
    finally:
        hosts[1].reconnect()
        child.kill()
        child.communicate()
    assert child.returncode != 0
    assert "node2" in errors and "gloo" not in errors, errors
    if how == "stopped":
        assert "rank 1 on node2" in errors, errors
    assert took < (20 if how == "stopped" else 15), f"{took:.1f} s\n{errors}"
    assert not hosts.wait_idle(30)


def loading_on(hosts: Hosts, name: str) -> list[int]:
    """Process ids of the ranks on a host that have mapped the model's weights."""
    found = hosts.cluster.processes().get(name, {})
    ranks = [pid for pid, command in found.items() if GENERATING.name in command]
    return [pid for pid in ranks if ".gguf" in Path(f"/proc/{pid}/maps").read_text()]
