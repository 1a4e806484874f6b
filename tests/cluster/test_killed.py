# SPDX-License-Identifier: Apache-2.0
"""What starts the agents, or one of them, is killed: nothing hangs, nothing is left, and that is the cause."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster_hosts import PROGRAMS, WAIT, Hosts

from waiting import wait_for

# Two ranks that meet again and again; one that is alone ends well.
MEETING = """
import datetime, os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
if size == 1:
    print("alone")
    sys.exit(0)
value = torch.ones(1)
dist.all_reduce(value)
open(f"met-{rank}", "w").close()
while True:
    dist.all_reduce(value)
    time.sleep(0.1)
"""


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", pytest.param("pdsh", marks=pytest.mark.slow)])
def test_a_killed_launcher_of_the_agents_is_the_cause(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    options = ["--grace-period", 1, WAIT, tmp_path, "--child"]
    with hosts.start(launcher, hosts.hostfile(tmp_path, 2), *options) as child:
        hosts.wait_started(tmp_path, 4)
        below = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        name = PROGRAMS[launcher][0]
        (program,) = [int(pid) for pid in below if name in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]]
        os.kill(program, signal.SIGKILL)
        _, errors = child.communicate(timeout=60)
        left = hosts.wait_idle(30)
    assert not left, errors
    assert child.returncode == 128 + signal.SIGKILL, errors
    assert f"error: {name} was killed by SIGKILL; 4 workers were ended" in errors
    assert "rank" not in errors


# One that is alone ends well; else it waits for what never comes, as in a collective with a host that is silent.
WAITING = """
import os, pathlib, time
pathlib.Path(f"met-{os.environ['RANK']}").touch()
while os.environ["WORLD_SIZE"] != "1":
    time.sleep(0.2)
print("alone in round", os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def _agent(hosts: Hosts, at: int) -> int:
    """The process id of a host's agent, whose guardian lives on."""
    running = hosts[at].processes()
    agents = [pid for pid, line in running.items() if line.endswith("-m anyaccel.launch.cluster.node")]
    return min(pid for pid in agents if Path(f"/proc/{pid}/comm").read_text() != "anyaccel-guard\n")


@pytest.mark.slow
def test_workers_that_wait_for_a_lost_host_are_ended(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    options = ["--elastic", "1:2", "--max-restarts", 2, "--no_local_rank", "waiting.py"]
    with hosts.start("ssh", hosts.hostfile(tmp_path, 1), *options) as child:
        wait_for(lambda: all((tmp_path / f"met-{rank}").exists() for rank in (0, 1)), "both ranks run", 120)
        os.kill(_agent(hosts, 1), signal.SIGKILL)
        output, errors = child.communicate(timeout=170)
        left = hosts.wait_idle(30)
    assert not left, errors
    assert (child.returncode, output) == (0, "alone in round 1\n"), errors
    assert "ending workers that wait for a lost host" in errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_agent_of_an_elastic_job(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    options = ["--elastic", "1:2", "--max-restarts", 2, "--no_local_rank", "meeting.py"]
    with hosts.start("ssh", hosts.hostfile(tmp_path, 1), *options) as child:
        wait_for(lambda: all((tmp_path / f"met-{rank}").exists() for rank in (0, 1)), "both ranks run", 120)
        os.kill(_agent(hosts, victim), signal.SIGKILL)
        output, errors = child.communicate(timeout=170)
        left = hosts.wait_idle(30)
    assert not left, errors
    if victim:
        assert (child.returncode, output) == (0, "alone\n"), errors
        assert "warning: host node2: the connection was lost" in errors
    else:
        assert child.returncode == 1, errors
        assert "error: host node1: the connection was lost" in errors
