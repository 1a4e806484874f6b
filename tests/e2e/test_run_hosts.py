# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run` on several hosts, as far as one machine without root can show it.

Two names of this machine count as two hosts, each with an agent of its own. Real hosts are in tests/cluster.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from anyaccel.launch.cluster.callback import Contact
from waiting import wait_for

WORKER = """
import json, os, signal, sys, time
rank = os.environ["RANK"]
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT MINE".split()
report = {name: os.environ.get(name) for name in names}
report |= {"PID": os.getpid(), "argv": sys.argv[1:], "cwd": os.getcwd(), "cores": sorted(os.sched_getaffinity(0))}
with open(f"tmp-{rank}", "w") as file:
    json.dump(report, file)
os.rename(f"tmp-{rank}", f"rank-{rank}.json")
if "fail" in sys.argv and rank == "1":
    print("the last words", file=sys.stderr)
    sys.exit(7)
if "wait" in sys.argv or "fail" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
ARGUMENTS = ["a b", "$HOME", "", "it's", 'say "no"', "new\nline", "ü→∞", "--", "%n"]


def command(*arguments):
    return [sys.executable, "-m", "anyaccel", "run", *map(str, arguments)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "hosts").write_text("localhost slots=1  # the first\n\n127.0.0.1 slots=2\n")
    return tmp_path


@pytest.fixture
def run(folder):
    def call(*arguments, **environment):
        return subprocess.run(
            command(*arguments),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
        )

    return call


def reports(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def test_each_host_starts_its_ranks_and_all_arguments_arrive(run, folder):
    done = run("--hostfile", "hosts", "--export", "MINE=a 'b'\n$c", "worker.py", *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    found = reports(folder)
    assert [report["RANK"] for report in found] == ["0", "1", "2"]
    assert [report["LOCAL_RANK"] for report in found] == ["0", "0", "1"]
    assert [report["LOCAL_SIZE"] for report in found] == ["1", "2", "2"]
    assert [report["CROSS_RANK"] for report in found] == ["0", "1", "1"]
    assert {report["WORLD_SIZE"] for report in found} == {"3"}
    assert {report["MASTER_ADDR"] for report in found} == {"127.0.0.1"}
    assert len({report["MASTER_PORT"] for report in found}) == 1
    for report in found:
        assert report["argv"] == [f"--local_rank={report['LOCAL_RANK']}", *ARGUMENTS]
        assert report["MINE"] == "a 'b'\n$c"
        assert report["cwd"] == str(folder)


def test_a_failure_is_told_with_host_and_code_and_ends_what_ignores_it(run):
    done = run("--hostfile", "hosts", "--grace-period", "0.5", "worker.py", "fail")
    assert done.returncode == 7
    assert "error: rank 1 on host 127.0.0.1 (process " in done.stderr
    assert "exited with code 7; 2 other workers were ended\n" in done.stderr
    assert "anyaccel:   | the last words\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all_hosts(folder, number):
    arguments = command("--hostfile", "hosts", "--grace-period", "0.5", "worker.py", "wait")
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(reports(folder)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(60)
        process.stderr.read()  # its end: nothing of the job holds it open
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)


def test_nothing_starts_when_one_host_cannot(run, folder):
    (folder / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=500\n")
    done = run("--hostfile", "hosts", "--bind_cores_to_rank", "worker.py")
    assert done.returncode == 2
    assert "error: host 127.0.0.1: 500 workers cannot each have a core of their own" in done.stderr
    assert reports(folder) == []


def test_a_host_that_is_not_there_is_named(run, folder):
    (folder / "hosts").write_text("localhost slots=1\nnobody.invalid slots=1\n")
    done = run("--hostfile", "hosts", "worker.py")
    assert done.returncode == 1
    assert "error: host nobody.invalid: cannot be reached: " in done.stderr
    assert reports(folder) == []


MPIRUN = """#!/bin/sh
# As Open MPI's: starts every process here, and goes on when one fails.
for rank in 0 1 2; do
    local=$((rank == 2))
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=$local \\
    OMPI_COMM_WORLD_LOCAL_SIZE=$((1 + (rank > 0))) {agent} &
done
wait
"""


@pytest.fixture
def mpirun(folder):
    """A launcher that starts processes and does nothing else for them."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "mpirun.openmpi").write_text(MPIRUN.format(agent=f"'{sys.executable}' -P -m anyaccel.launch.cluster.node"))
    (tools / "mpirun.openmpi").chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


def test_agents_below_another_launcher_call_back(run, folder, mpirun):
    done = run("--hostfile", "hosts", "--launcher", "openmpi", "worker.py", *ARGUMENTS, **mpirun)
    assert done.returncode == 0, done.stderr
    found = reports(folder)
    assert [report["LOCAL_RANK"] for report in found] == ["0", "0", "1"]
    assert all(report["argv"][1:] == ARGUMENTS for report in found)


def test_the_code_of_a_failed_rank_does_not_depend_on_the_launcher(run, mpirun):
    done = run("--hostfile", "hosts", "--launcher", "openmpi", "--grace-period", "0.5", "worker.py", "fail", **mpirun)
    assert done.returncode == 7, done.stderr
    assert "rank 1 on host 127.0.0.1" in done.stderr
    assert "the last words" in done.stderr


def test_a_launcher_that_ends_early_is_named(run, mpirun, folder):
    (folder / "tools" / "mpirun.openmpi").write_text("#!/bin/sh\nexit 3\n")
    done = run("--hostfile", "hosts", "--launcher", "openmpi", "worker.py", **mpirun)
    assert done.returncode == 1
    assert "mpirun.openmpi exited with code 3 before workers were started on host localhost, 127.0.0.1" in done.stderr


@pytest.mark.parametrize("first", ["kill -KILL $agents; sleep 0.2; ", ""], ids=["with its ranks", "alone"])
def test_a_launcher_that_is_killed_is_the_cause(run, mpirun, folder, first):
    """Its ranks, which some of them take along, are not to blame."""
    program = folder / "tools" / "mpirun.openmpi"
    started = "until ls rank-0.json rank-1.json rank-2.json; do sleep 0.1; done >/dev/null 2>&1"
    text = program.read_text().replace(" &\n", ' & agents="$agents $!"\n')
    program.write_text(text.replace("wait\n", f"cd {folder}; {started}; {first}kill -KILL $$\n"))
    options = ("--hostfile", "hosts", "--launcher", "openmpi", "--grace-period", "0.5", "worker.py", "wait")
    done = run(*options, **mpirun)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "error: mpirun.openmpi was killed by SIGKILL; 3 workers were ended" in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_launcher_that_places_ranks_otherwise_is_told_so(run, mpirun, folder):
    (folder / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    done = run("--hostfile", "hosts", "--launcher", "openmpi", "worker.py", **mpirun)
    assert done.returncode == 2
    assert "it has not placed ranks host by host in the order of the hostfile" in done.stderr
    assert reports(folder) == []


def test_one_machine_under_two_names_that_the_launcher_numbers_together_is_told(run, mpirun, folder):
    program = folder / "tools" / "mpirun.openmpi"
    program.write_text(program.read_text().replace("$((rank == 2))", "$rank"))
    done = run("--hostfile", "hosts", "--launcher", "openmpi", "worker.py", **mpirun)
    assert done.returncode == 2
    assert (
        "error: host 127.0.0.1: localhost and 127.0.0.1 are one machine under 2 names, whose ranks Open MPI numbers "
        "together; write it once, with all of its slots (localhost slots=3), or use --launcher ssh"
    ) in done.stderr
    assert reports(folder) == []


def test_the_plan_asks_no_host(run, folder):
    (folder / "hosts").write_text("nobody.invalid slots=2\nother.invalid slots=3\n")
    done = run("--hostfile", "hosts", "--include", "other.invalid:1,2", "--dry-run", "--json", "worker.py")
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 2
    assert plan["hosts"] == [{"name": "other.invalid", "slots": [1, 2], "first_rank": 0}]
    assert plan["commands"][0][0] == "ssh"


def test_each_host_may_be_started_by_hand(folder):
    options = [
        "--no_ssh",
        "--num_nodes",
        2,
        "--num_accelerators",
        1,
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        ranks.free_port(),
    ]
    children = [subprocess.Popen(command(*options, "--node_rank", rank, "worker.py"), cwd=folder) for rank in (0, 1)]
    assert [child.wait(30) for child in children] == [0, 0]
    found = reports(folder)
    assert [(report["RANK"], report["WORLD_SIZE"], report["CROSS_RANK"]) for report in found] == [
        ("0", "2", "0"),
        ("1", "2", "1"),
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each")
@pytest.mark.parametrize("by_list", [False, True], ids=["the machine", "lists by hand"])
def test_hosts_that_are_started_by_hand_on_one_machine_divide_it(folder, by_list):
    (folder / "hosts").write_text(f"localhost slots=1\n{socket.gethostname()} slots=1\n")
    cores = sorted(os.sched_getaffinity(0))
    at = ["--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", ranks.free_port()]
    children = []
    for rank in (0, 1):
        given = ["--bind_core_list", str(cores[-1 - rank])] if by_list else []
        argv = command(*at, "--bind_cores_to_rank", *given, "--node_rank", rank, "worker.py")
        children.append(subprocess.Popen(argv, cwd=folder, stderr=subprocess.PIPE, text=True))
    errors = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    found = [report["cores"] for report in reports(folder)]
    assert not set(found[0]) & set(found[1])
    if by_list:
        assert found == [[cores[-1]], [cores[-2]]]
        assert all("are one machine, and this run divides the cores that it was given" in error for error in errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hostfile", "nofile"], "hostfile 'nofile' cannot be read: No such file or directory"),
        (["--hostfile", "hosts", "--include", "other"], "host 'other' is not in the hostfile"),
        (["--hostfile", "hosts", "--num_accelerators", "2"], "--num_accelerators 2 is more than the 1 slots"),
        (["--launcher", "impi"], "--launcher impi needs to know the hosts; add --hostfile FILE"),
        (
            ["--hostfile", "hosts", "--launcher", "mpi"],
            "'mpi' is not known (did you mean impi?); choose one of ssh, pdsh",
        ),
        (["--num_nodes", "2"], "--num_nodes 2 needs to know the hosts"),
        (["--no_ssh"], "--no_ssh needs the number of this host; add --node_rank N"),
        (["--node_rank", "1"], "--node_rank 1 is for --no_ssh"),
        (["--no_ssh", "--node_rank", "0"], "--no_ssh needs the number of workers on every host"),
        (["--no_ssh", "--node_rank", "2", "--hostfile", "hosts"], "--node_rank is 2, there are 2 hosts"),
        (["--no_ssh", "--node_rank", "1", "--hostfile", "hosts"], "--no_ssh needs --master_addr"),
        (["--hostfile", "hosts", "--elastic", "2:3"], "--elastic 2:3 wants up to 3 hosts, and there are 2"),
        (["--elastic", "x"], "--elastic 'x' is no range of hosts; write it as 2:4"),
        (["--max-restarts", "-1"], "--max-restarts is -1, it must be 0 or more"),
        (["--ssh_port", "99999"], "--ssh_port is 99999, a TCP port is between 1 and 65535"),
    ],
)
def test_options_that_cannot_be(run, arguments, message):
    done = run(*arguments, "worker.py")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_end_of_one_agent_ends_the_job_everywhere(folder):
    """Its guardian is killed: no worker of its host failed, and yet they are gone."""
    arguments = command("--hostfile", "hosts", "--grace-period", "0.5", "worker.py", "wait")
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(reports(folder)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = {report["RANK"]: report["PID"] for report in reports(folder)}
        stat = Path(f"/proc/{workers['0']}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert process.wait(60) == 137 or process.returncode == 1
        errors = process.stderr.read()
    assert "error: host localhost: the supervising process was killed by SIGKILL" in errors


def test_the_login_of_the_user_does_not_name_the_master(run, folder):
    done = run("--hostfile", "hosts", "worker.py", SSH_CONNECTION="203.0.113.9 5 198.51.100.7 22")
    assert done.returncode == 0, done.stderr
    assert {report["MASTER_ADDR"] for report in reports(folder)} == {"127.0.0.1"}


def test_a_launcher_that_ignores_signals_is_ended(run, mpirun, folder):
    (folder / "tools" / "mpirun.openmpi").write_text(
        "#!/bin/sh\ntrap '' TERM INT\n: >up\nsleep 600 & wait; sleep 600\n"
    )
    process = subprocess.Popen(
        command("--hostfile", "hosts", "--launcher", "openmpi", "worker.py"), cwd=folder, env={**os.environ, **mpirun}
    )
    wait_for((folder / "up").exists, "the launcher has not started mpirun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


@pytest.mark.parametrize(
    "addresses", [("255.255.255.255", "127.0.0.1"), ("fe80::1%nowhere", "127.0.0.1"), ("2001:db8::1", "127.0.0.1")]
)
def test_an_address_that_cannot_be_reached_does_not_hide_one_that_can(addresses):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Contact(listener.getsockname()[1], "word", addresses).call() as connection,
    ):
        assert connection.getpeername() == listener.getsockname()


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("ssh", "localhost 127.0.0.1"),
        ("ssh", "NAME ::1"),
        ("openmpi", "127.0.0.1 NAME"),
        ("elastic", "localhost NAME"),
    ],
)
def test_names_of_one_machine_share_no_core(run, folder, mpirun, names, launcher):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    hosts = names.replace("NAME", socket.gethostname()).split()
    (folder / "hosts").write_text("".join(f"{host} slots=1\n" for host in hosts))
    (folder / "tools" / "mpirun.openmpi").write_text(
        MPIRUN.replace("0 1 2", "0 1")
        .replace("SIZE=3", "SIZE=2")
        .replace("$((rank == 2))", "0")
        .replace("(1 + (rank > 0))", "((1))")
        .format(agent=f"'{sys.executable}' -P -m anyaccel.launch.cluster.node")
    )
    options = {"ssh": [], "openmpi": ["--launcher", "openmpi"], "elastic": ["--max-restarts", "0"]}[launcher]
    done = run("--hostfile", "hosts", "--bind_cores_to_rank", *options, "worker.py", **mpirun)
    assert done.returncode == 0, done.stderr
    first, second = (set(report["cores"]) for report in reports(folder))
    assert first
    assert second
    assert not first & second


def test_one_machine_has_its_cores_once(run, folder):
    cores = len(os.sched_getaffinity(0))
    (folder / "hosts").write_text(f"localhost slots=1\n127.0.0.1 slots={cores}\n")
    done = run("--hostfile", "hosts", "--bind_cores_to_rank", "worker.py")
    assert done.returncode == 2
    assert f"{cores + 1} workers cannot each have a core of their own" in done.stderr
    assert "(hosts localhost, 127.0.0.1 are one machine)" in done.stderr
    assert reports(folder) == []
