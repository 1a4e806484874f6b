# SPDX-License-Identifier: Apache-2.0
"""Real jobs over several hosts, through each launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from cluster_hosts import ALL_REDUCE, LAUNCHERS, WAIT, Hosts, lines

from waiting import settled

ARGUMENTS = ["a b", "$HOME", "", "it's", 'say "no"', "back\\slash", "*", "new\nline", "ü→∞", "%n"]
SSH_LAUNCHERS = ["ssh", "pdsh", "openmpi", "mpich", "impi"]
# One of the two ways in which agents talk to the launcher is enough for `make test`.
MOSTLY_SSH = ["ssh", *(pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHERS if name != "ssh")]


def grace(launcher: str) -> list[object]:
    """Workers that take no notice of signals have 3 s by default; for ssh only, since each test waits for them."""
    return [] if launcher == "ssh" else ["--grace-period", 1]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_reduce(hosts: Hosts, launcher: str, tmp_path: Path, count: int) -> None:
    done = hosts.run(launcher, hosts.hostfile(tmp_path, hosts=count), ALL_REDUCE, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    ranks = lines(done.stdout)
    names = [f"node{number + 1}" for number in range(count)]
    assert [line["rank"] for line in ranks] == list(range(count)), done.stdout
    assert [line["host"] for line in ranks] == names
    assert [line["address"] for line in ranks] == [host.address for host in hosts.cluster][:count]
    for line in ranks:
        assert line["sum"] == count * (count + 1) / 2
        assert line["hosts"] == names
        assert line["local_rank"] == 0
        assert line["master"] == hosts[0].address
        assert line["arguments"] == ARGUMENTS


def _places(folder: Path) -> dict[int, str]:
    """Host of each rank that wait.py has told of."""
    return {
        int(path.name[4:]): path.read_text().split()[1] for path in folder.glob("rank?") if path.suffix == ""
    }  # fmt: skip


def test_ranks_follow_the_hostfile(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# not in order\nnode3 slots=1\n\nnode1 slots=2\nnode2 slots=1\n")
    done = hosts.run(launcher, tmp_path / "hosts", WAIT, tmp_path, "--end")
    assert done.returncode == 0, done.stderr
    assert _places(tmp_path) == {0: "node3", 1: "node1", 2: "node1", 3: "node2"}


def test_include_chooses_hosts_and_slots(hosts: Hosts, tmp_path: Path) -> None:
    file = hosts.hostfile(tmp_path, 2, 4)
    done = hosts.run("ssh", file, "--include", "node2:1@node4", WAIT, tmp_path, "--end")
    assert done.returncode == 0, done.stderr
    assert _places(tmp_path) == {0: "node2", 1: "node4", 2: "node4"}


def test_ranks_of_a_host_get_their_own_cores(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    done = hosts.run(launcher, hosts.hostfile(tmp_path, 2), "--bind_cores_to_rank", WAIT, tmp_path, "--end")
    assert done.returncode == 0, done.stderr
    cpus = [set(json.loads((tmp_path / f"rank{rank}").read_text().split(" ", 2)[2])) for rank in range(4)]
    assert cpus[0] and cpus[1] and not cpus[0] & cpus[1]
    assert cpus[2] and cpus[3] and not cpus[2] & cpus[3]


@pytest.mark.parametrize("launcher", SSH_LAUNCHERS)
def test_another_port_of_sshd(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    done = hosts.run(launcher, hosts.hostfile(tmp_path), "--ssh_port", 2222, WAIT, tmp_path, "--end")
    assert done.returncode == 0, done.stderr
    assert _places(tmp_path) == {0: "node1", 1: "node2"}


@pytest.mark.parametrize("launcher", MOSTLY_SSH)
def test_variables_travel(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "show.sh"
    script.write_text('#!/bin/sh\nprintf "%s|%s|%s" "$MY_WORD" "$MY_OTHER" "$NCCL_DEBUG" >"$1/env$RANK"\n')
    script.chmod(0o755)
    values = {"MY_WORD": "a 'b' \"c\" $d\n\\e", "NCCL_DEBUG": "from a prefix"}
    options = ["--export", "MY_WORD", "--export", "MY_OTHER=given here", "--no_python", "--no_local_rank"]
    done = hosts.run(launcher, hosts.hostfile(tmp_path), *options, script, tmp_path, variables=values)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"env{rank}").read_text() == f"{values['MY_WORD']}|given here|from a prefix"


@pytest.mark.parametrize("how", [["--exit", "7"], pytest.param(["--signal", "9"], marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_the_job(hosts: Hosts, launcher: str, tmp_path: Path, how: list[str]) -> None:
    file = hosts.hostfile(tmp_path, 2)
    child = hosts.start(launcher, file, *grace(launcher), WAIT, tmp_path, "--fail-rank", 3, "--ignore", "--child", *how)
    with child:
        hosts.wait_started(tmp_path, 4)
        _, errors = child.communicate(timeout=60)
    assert not hosts.wait_idle(30), errors
    assert child.returncode == (7 if "7" in how else 137), errors
    assert "rank 3" in errors
    assert "node2" in errors
    assert "the last words of rank 3" in errors
    assert ("code 7" if "7" in how else "SIGKILL") in errors


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_an_ended_launcher_leaves_nothing(hosts: Hosts, launcher: str, tmp_path: Path, number: signal.Signals) -> None:
    with hosts.start(
        launcher, hosts.hostfile(tmp_path, 2), *grace(launcher), WAIT, tmp_path, "--ignore", "--child"
    ) as child:
        hosts.wait_started(tmp_path, 4)
        child.send_signal(number)
        child.wait(60)
        left = hosts.wait_idle(30)
        hosts.cluster.kill_jobs()
        _, errors = child.communicate()
    assert not left, errors
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number), errors


@pytest.mark.parametrize("name", ["nobody", pytest.param("nothere", marks=pytest.mark.slow)])
def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, launcher: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "hosts").write_text(f"node1 slots=1\nnode2 slots=1\n{name} slots=1\n")
    done = hosts.run(launcher, tmp_path / "hosts", WAIT, tmp_path)
    assert not hosts.wait_idle(30), done.stderr
    assert done.returncode not in (0, None)
    assert name in done.stderr


@pytest.mark.parametrize("launcher", MOSTLY_SSH)
def test_a_lost_connection_ends_the_job_on_both_sides(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    options = ["--grace-period", 1, WAIT, tmp_path, "--ignore", "--child"]
    with hosts.start(launcher, hosts.hostfile(tmp_path, 2), *options) as child:
        hosts.wait_started(tmp_path, 4)
        hosts[1].disconnect()
        try:
            _, errors = child.communicate(timeout=60)
            # On the host that is cut off too: nobody can tell it.
            settled(lambda: any(map(_workers, hosts.cluster.processes().values())), False, 60)
            left = {host: found for host, found in hosts.cluster.processes().items() if _workers(found)}
        finally:
            hosts[1].reconnect()
            child.kill()
            hosts.cluster.kill_jobs()
    assert not left, errors
    assert "host node2: the connection to ranks 2-3 was lost" in errors
    assert child.returncode != 0


def _workers(processes: dict[int, str]) -> bool:
    """Whether workers are among them; sshd's side of a lost connection waits for the network."""
    return any("wait.py" in line or line == "sleep 610" for line in processes.values())


def test_each_host_is_started_by_hand(hosts: Hosts, tmp_path: Path) -> None:
    file = hosts.hostfile(tmp_path, 1, 2)
    children: list[subprocess.Popen[str]] = []
    for rank in (0, 1):
        options = ["--no_ssh", "--node_rank", rank, "--master_addr", hosts[0].address, "--master_port", 29600]
        command = hosts.command("", file, [*options, ALL_REDUCE])
        environment = hosts.environment("")
        children.append(
            hosts[rank].popen(command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    done = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], done
    ranks = lines("".join(output for output, _ in done))
    assert [line["host"] for line in ranks] == ["node1", "node2"]
    assert {line["sum"] for line in ranks} == {3.0}


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host_that_dies(hosts: Hosts, tmp_path: Path) -> None:
    options = ["--elastic", "1:2", "--max-restarts", 2, "--no_local_rank"]
    done = hosts.run("ssh", hosts.hostfile(tmp_path), *options, ALL_REDUCE.with_name("elastic.py"), timeout=170)
    assert done.returncode == 0, done.stderr
    assert "warning: host node2: the connection was lost" in done.stderr
    assert "finished with 1 in round 1" in done.stdout


@pytest.mark.parametrize(
    "launcher", ["ssh", "pdsh", *(pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHERS[2:])]
)
def test_a_reader_that_has_gone_ends_workers_that_write(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    """Some launchers exit with 0 when they cannot write, others crash; workers of theirs would go on for ever."""
    shell = ["--no_python", "--no_local_rank", "sh", "-c", "exec yes"]
    with hosts.start(launcher, hosts.hostfile(tmp_path), *shell) as child:
        assert child.stdout
        assert os.read(child.stdout.fileno(), 2) == b"y\n"
        child.stdout.close()
        assert child.stderr
        errors = child.stderr.read()
    assert "error: standard output: Broken pipe; output of the workers is lost" in errors
    # ssh tells the other side, which closes the pipe of the workers; with the others the job is ended.
    assert child.returncode == (128 + signal.SIGPIPE if launcher == "ssh" else 1), errors


@pytest.mark.parametrize("launcher", MOSTLY_SSH)
def test_a_relative_pythonpath_is_that_of_the_folder_of_the_job(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    note = "import os, sys\nif 'anyaccel.launch.cluster.node' in sys.orig_argv: "
    note += "open(f'{folder}/' + os.uname().nodename, 'w')\n"
    (tmp_path / "lib" / "sitecustomize.py").write_text(note.replace("{folder}", str(tmp_path)))
    variables = {"PYTHONPATH": "lib"}
    done = hosts.run(launcher, hosts.hostfile(tmp_path), WAIT, tmp_path, "--end", variables=variables)
    assert done.returncode == 0, done.stderr
    # The Python that anyaccel itself starts in there has it too, before it is in that folder.
    assert (tmp_path / "node2").exists()
