# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run` when what supervises is itself in trouble: stopped, killed, or without a `/proc` of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anyaccel.launch.local.protocol import SENT_TO_ALL
from waiting import wait_for

RUN = [sys.executable, "-m", "anyaccel", "run", "--no_local_rank"]
TWO_HOSTS = "localhost slots=1\n127.0.0.1 slots=1\n"
# Each worker writes its process id, and waits.
WRITE = "echo $$ >tmp$RANK && mv tmp$RANK rank$RANK && "
SLEEP = "exec sleep 600"


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def start(tmp_path):
    """Start a job that waits; gives the launcher and the guardian of each rank."""
    children = []

    def go(hosts, *options, then=SLEEP):
        (tmp_path / "hosts").write_text(TWO_HOSTS)
        where = ["--hostfile", "hosts"] if hosts else ["--num_accelerators", "2"]
        command = [*RUN, *where, *map(str, options), "--no_python", "sh", "-c", WRITE + then]
        child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        children.append(child)
        files = [tmp_path / f"rank{rank}" for rank in (0, 1)]
        wait_for(lambda: all(file.exists() for file in files), "both workers run")
        return child, [parent(int(file.read_text())) for file in files]

    yield go
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("hosts", "number"), [(False, signal.SIGTERM), (True, signal.SIGTERM), (True, signal.SIGKILL)])
def test_a_guardian_that_is_stopped_does_its_work_when_there_is_some(start, hosts, number):
    launcher, guardians = start(hosts, "--grace-period", 1)
    stop(guardians[0])
    asked = time.monotonic()
    launcher.send_signal(number)
    launcher.communicate(timeout=60)  # nothing of the job holds standard error open
    assert launcher.returncode == (128 + number if number == signal.SIGTERM else -number)
    # Not by the last resort, which comes 36 s later: the grace period, 30 s for a process to end, and 5 s.
    assert time.monotonic() - asked < 35


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state(pid) == "T", "it stops")


@pytest.mark.parametrize("hosts", [False, True], ids=["here", "hosts"])
def test_a_worker_that_is_killed_while_the_guardian_is_stopped(start, tmp_path, hosts):
    launcher, guardians = start(hosts, "--grace-period", 1)
    stop(guardians[0])
    os.kill(int((tmp_path / "rank0").read_text()), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)  # it used to wait for ever
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "error: rank 0" in errors


def test_workers_that_end_well_while_the_guardian_is_stopped(start, tmp_path):
    launcher, guardians = start(False, then="while test -e rank$RANK; do sleep 0.1; done")
    stop(guardians[0])
    for rank in (0, 1):
        (tmp_path / f"rank{rank}").unlink()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0


def test_a_guardian_that_is_stopped_while_it_ends_a_job(tmp_path):
    """Rank 0 has failed and is reaped, rank 1 is deaf: only the grace period is left to wait for."""
    shell = "trap '' TERM; test $RANK = 1 || exit 7; echo $PPID >tmp; mv tmp guardian; while :; do sleep 1; done"
    command = [*RUN, "--num_accelerators", "2", "--grace-period", "3", "--no_python", "sh", "-c", shell]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        wait_for((tmp_path / "guardian").exists, "rank 1 runs")
        guardian = int((tmp_path / "guardian").read_text())
        children = Path(f"/proc/{guardian}/task/{guardian}/children")
        wait_for(lambda: len(children.read_text().split()) == 1, "rank 0 is reaped")
        stop(guardian)
        launcher.communicate(timeout=60)
        assert launcher.returncode == 7


@pytest.mark.parametrize("hosts", [False, True], ids=["here", "hosts"])
def test_a_guardian_that_is_killed(start, hosts):
    launcher, guardians = start(hosts)
    os.kill(guardians[0], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL
    workers = "1 worker was" if hosts else "2 workers were"
    assert f"the supervising process was killed by SIGKILL; {workers} ended\n" in errors


@pytest.mark.parametrize("hosts", [False, True], ids=["here", "hosts"])
def test_a_grace_period_longer_than_any_timer(tmp_path, hosts):
    (tmp_path / "hosts").write_text(TWO_HOSTS)
    where = ["--hostfile", "hosts"] if hosts else ["--num_accelerators", "2"]
    shell = ["--no_python", "sh", "-c", "test $RANK = 1 && exit 7; exec sleep 600"]
    command = [*RUN, *where, "--grace-period", "31536000", *shell]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60).returncode == 7


# What gives the launcher a /proc that does not show its processes, or shows others by their numbers.
WITHOUT_PROC = {
    "no /proc": "unshare --mount sh -c 'mount -t tmpfs none /proc && exec \"$@\"' sh",
    "of the namespace around": "unshare --pid --fork",
    "the guardian is the first of its namespace": "unshare --pid",
    "no /proc in a namespace": "unshare --mount --pid --fork sh -c 'mount -t tmpfs none /proc; \"$@\"' sh",
}


@pytest.mark.parametrize("how", WITHOUT_PROC)
def test_nothing_stays_and_no_other_process_is_touched_without_a_proc_of_ones_own(tmp_path, how):
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    # A grandchild that is deaf to SIGTERM, in a session of its own, below another one.
    deaf = "trap '' TERM; sleep 600 & sleep 600"
    job = f'setsid sh -c "{deaf}" & : >ready; sleep 0.2; exit 3'
    command = [*RUN, "--num_accelerators", "1", "--no_python", "sh", "-c", job]
    shell = ["sh", "-c", f'{WITHOUT_PROC[how]} "$@"', "sh", *command]
    began = time.monotonic()
    # Whatever of it stays holds its standard error open.
    done = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (tmp_path / "ready").exists(), done.stderr
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - began < 30  # after which it used to give up
    assert "do not end" not in done.stderr
    assert "worker" not in done.stderr.replace("what finished workers left behind", "")  # as in kworker/0:1
    assert "exited with code 3" in done.stderr


# What torch's launcher does: it starts a worker, waits for its end, and starts another one.
ROUNDS = """
import os, subprocess, sys
command = [sys.executable, "-m", "anyaccel.launch.local.rounds", sys.executable, "worker.py"]
helper = subprocess.Popen(["sleep", "600"])  # of its own; it stays
for number in range(2):
    worker = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": str(number)}
    others = [subprocess.Popen(command, env={**worker, "LOCAL_RANK": str(rank)}) for rank in range(2)]
    if any([other.wait() for other in others]) or helper.poll() is not None:
        sys.exit(1)
helper.kill()
"""
# Each worker leaves two processes behind: one in a session of its own and deaf to SIGTERM, one below another.
LEAVES = """
import os, pathlib, subprocess, sys, time
mine = os.environ["TORCHELASTIC_RESTART_COUNT"] + "-" + os.environ["LOCAL_RANK"]
earlier = [int(pid) for path in pathlib.Path().glob("left-0*") for pid in path.read_text().split()]
if mine.startswith("1"):
    assert len(earlier) == 4, earlier
    alive = [pid for pid in earlier if os.path.exists(f"/proc/{pid}")]
    assert not alive, alive
else:
    shell = 'trap "" TERM; sleep 600 & echo $$ $! >tmp-$0; mv tmp-$0 left-$0; wait'
    subprocess.Popen(["sh", "-c", shell, mine], start_new_session=True)
    # Both are to be there when the first round is over.
    while len(list(pathlib.Path().glob("left-0*"))) < 2:
        time.sleep(0.01)
"""


def test_a_round_sees_nothing_of_the_one_before(tmp_path):
    (tmp_path / "rounds.py").write_text(ROUNDS)
    (tmp_path / "worker.py").write_text(LEAVES)
    done = subprocess.run(
        [*RUN, "--num_accelerators", "1", "rounds.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "ending what an earlier round left behind: " in done.stderr


def test_what_starts_a_round_without_a_guardian_ends_nothing(tmp_path):
    """The processes of a shell are not those of a job."""
    (tmp_path / "rounds.py").write_text(ROUNDS)
    (tmp_path / "worker.py").write_text("")
    with subprocess.Popen(["sleep", "600"]) as other:
        done = subprocess.run([sys.executable, "rounds.py"], cwd=tmp_path, timeout=60, env={**os.environ, "RANK": "0"})
        assert other.poll() is None
        other.kill()
    assert done.returncode == 0


# A worker that writes down each signal for it, and ends at SIGTERM.
COUNT = """exec python3 -u -c '
import os, signal, time
mine = "tmp" + os.environ["RANK"]
def note(number, frame):
    open("got" + os.environ["RANK"], "a").write(signal.Signals(number).name + " ")
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGUSR2, note)
os.rename(mine, "rank" + os.environ["RANK"])
while True: time.sleep(60)
'"""
COUNT_WRITE = "echo $$ >tmp$RANK && "


def got(tmp_path):
    files = [tmp_path / f"got{rank}" for rank in (0, 1)]
    return [file.read_text().split() if file.exists() else [] for file in files]


def parents(pid, last):
    found = []
    while (pid := parent(pid)) != last:
        found.append(pid)
    return found


@pytest.mark.parametrize("everything", [False, True], ids=["to the launcher", "to all processes, as Slurm does"])
@pytest.mark.parametrize("hosts", [False, True])
def test_user_signals_are_for_the_workers_and_end_nothing(start, tmp_path, monkeypatch, hosts, everything):
    monkeypatch.setattr(sys.modules[__name__], "WRITE", COUNT_WRITE)
    launcher, _ = start(hosts, then=COUNT)
    workers = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    others = {pid for worker in workers for pid in parents(worker, launcher.pid)}
    for count, name in enumerate(["SIGUSR1", "SIGUSR2", "SIGUSR1"]):
        for pid in [launcher.pid, *(sorted(others) + workers if everything else [])]:
            os.kill(pid, getattr(signal, name))
        wait_for(lambda count=count: all(len(each) > count for each in got(tmp_path)), f"workers got {name}")
        time.sleep(SENT_TO_ALL + 0.5 if everything else 0)  # one that came twice would be here by now
    launcher.send_signal(signal.SIGTERM)
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 128 + signal.SIGTERM, errors
    assert got(tmp_path) == [["SIGUSR1", "SIGUSR2", "SIGUSR1"]] * 2
    assert "SIGUSR1 received" in errors


@pytest.mark.parametrize("hosts", [False, True])
def test_a_worker_without_a_handler_dies_of_a_user_signal_as_by_default(start, hosts):
    launcher, _ = start(hosts)
    launcher.send_signal(signal.SIGUSR1)
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 128 + signal.SIGUSR1
    assert "was killed by SIGUSR1" in errors
