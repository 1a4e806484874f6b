# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run` when what supervises is itself in trouble: stopped, killed, or without a `/proc` of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from waiting import wait_for

RUN = [sys.executable, "-m", "anyaccel", "run", "--no_local_rank"]
TWO_HOSTS = "localhost slots=1\n127.0.0.1 slots=1\n"
# Each worker writes its process id, and waits.
SLEEP = ["--no_python", "sh", "-c", "echo $$ >tmp$RANK && mv tmp$RANK rank$RANK && exec sleep 600"]


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def start(tmp_path):
    """Start a job that waits; gives the launcher and the guardian of each rank."""
    children = []

    def go(hosts, *options):
        (tmp_path / "hosts").write_text(TWO_HOSTS)
        where = ["--hostfile", "hosts"] if hosts else ["--num_accelerators", "2"]
        child = subprocess.Popen(
            [*RUN, *where, *map(str, options), *SLEEP], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
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
    os.kill(guardians[0], signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{guardians[0]}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it stops")
    asked = time.monotonic()
    launcher.send_signal(number)
    launcher.communicate(timeout=60)  # nothing of the job holds standard error open
    assert launcher.returncode == (128 + number if number == signal.SIGTERM else -number)
    # Not by the last resort, which comes after the 30 s that a process may take to end.
    assert time.monotonic() - asked < 25


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
