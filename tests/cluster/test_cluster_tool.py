# SPDX-License-Identifier: Apache-2.0
"""The hosts that other tests run on are hosts apart, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_hosts import REPOSITORY, Hosts, test_cluster

from waiting import settled

TOOL = REPOSITORY / "tools" / "test_cluster.py"


def _traces(owner: str = "") -> list[str]:
    """Namespaces and folders of clusters of one owner, or of all."""
    folders = (test_cluster.NETNS, Path(test_cluster.tempfile.gettempdir()))
    found = [path.name for folder in folders for path in folder.glob(f"{test_cluster.PREFIX}-*")]
    return [name for name in found if name.startswith(f"{test_cluster.PREFIX}-{owner}")]


def test_hosts_reach_each_other_by_name_without_a_question(hosts: Hosts) -> None:
    for port in (test_cluster.SSH_PORT, test_cluster.SSH_OTHER_PORT):
        done = hosts[0].run(["ssh", "-p", str(port), "node3", "hostname; echo $SSH_CONNECTION"])
        assert done.stdout.split() == ["node3", "10.77.0.1", done.stdout.split()[2], "10.77.0.3", str(port)]
        assert done.stderr == ""


def test_hosts_are_apart(hosts: Hosts) -> None:
    seen = [host.run(["sh", "-c", "hostname; ls /run /dev/shm; touch /dev/shm/here"]).stdout for host in hosts.cluster]
    assert [text.split()[0] for text in seen] == ["node1", "node2", "node3", "node4"]
    assert not any("here" in text for text in seen)
    assert not Path("/dev/shm/here").exists()
    for host in hosts.cluster:
        host.run(["rm", "/dev/shm/here"])


def test_a_host_that_is_cut_off_is_reached_again(hosts: Hosts) -> None:
    def reach(seconds: int) -> int:
        return hosts[0].run(["ssh", "-o", f"ConnectTimeout={seconds}", "node2", "true"]).returncode

    hosts[1].disconnect()
    assert reach(1) == 255
    hosts[1].reconnect()
    assert reach(30) == 0


def test_processes_of_hosts_are_seen_and_killed(hosts: Hosts) -> None:
    with hosts[2].popen(["sleep", "611"]) as child:
        wanted = {"node3": {child.pid: "sleep 611"}}
        assert settled(hosts.cluster.processes, wanted, 30) == wanted
        hosts.cluster.kill_jobs()
        assert child.wait() == -signal.SIGKILL


def test_run_gives_the_code_of_its_command_and_leaves_nothing(hosts: Hosts) -> None:
    before = set(_traces())
    command = [sys.executable, TOOL, "run", "2", "--", "sh", "-c", "ssh node2 hostname; exit 5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    assert done.stdout == "node2\n"
    # Other tests may run on this machine: theirs have an owner that lives.
    owners = {name.split("-")[2] for name in set(_traces()) - before}
    assert not [owner for owner in owners if test_cluster._identity(int(owner.split(".")[0])) != owner]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_leaves_nothing(hosts: Hosts, number: int) -> None:
    command = [sys.executable, TOOL, "run", "2", "--", "sh", "-c", "echo up; exec ssh node2 sleep 612"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        owner = test_cluster._identity(child.pid)
        assert _traces(owner)
        child.send_signal(number)
        child.stdout.close()
        child.wait(30)
    if number == signal.SIGKILL:
        assert _traces(owner)  # until the next one is set up, or `down`
        test_cluster.remove_leftovers()
    assert _traces(owner) == []
    assert not _finds("612")


def _finds(word: str) -> bool:
    found = subprocess.run(["pgrep", "-f", f"^sleep {word}$"], capture_output=True, check=False)
    return found.returncode == 0


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        assert "root" in (test_cluster.missing() or "")
        return
    monkeypatch.setattr(test_cluster, "which", lambda program: None if program == "slurmd" else f"/usr/bin/{program}")
    assert "apt install slurmd" in (test_cluster.missing(slurm=True) or "")
