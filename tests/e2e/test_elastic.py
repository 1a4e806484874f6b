# SPDX-License-Identifier: Apache-2.0
"""Workers that torch.distributed.elastic restarts, bound by `anyaccel bind`."""

import ast
import json
import os
import signal
import subprocess
import sys

import pytest

from anyaccel.launch.local.elastic import build_command, launcher_environment
from anyaccel.topology import read_machine
from ranks import free_port

two_cores = pytest.mark.skipif(len(read_machine().cores()) < 2, reason="needs two allowed physical cores")

# All ranks add up their numbers. Rank 1 fails as often as it is told to. Each rank adds a line to its file a round.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
name = f"rank-{rank}"
round = len(open(name).readlines()) if os.path.exists(name) else 0
with open(name, "a") as file:
    print(json.dumps({
        "total": int(total), "world": dist.get_world_size(), "argv": sys.argv[1:],
        "cores": sorted(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS"),
    }), file=file)
if rank == 1 and round < int(os.environ["FAILURES"]):
    os._exit(5)
dist.barrier()  # a host whose workers have finished takes no part in a restart
dist.destroy_process_group()
"""
ARGUMENTS = ["--", "a b", "$HOME ${local_rank} $$", "", "--nnodes", "'\"\n", "ä"]


@pytest.fixture
def start(tmp_path):
    """Starts one host of an elastic job in its own session, which ends with the test."""
    (tmp_path / "train.py").write_text(SCRIPT)
    started = []

    def call(failures, command=("python", "-u", "train.py"), **options):
        program = [sys.executable if word == "python" else word for word in command]
        argv = build_command(program, ARGUMENTS, python=sys.executable, **options)
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        extra = {"FAILURES": str(failures), "GLOO_SOCKET_IFNAME": "lo", **launcher_environment(kept, 3.0)}
        process = subprocess.Popen(
            argv,
            cwd=tmp_path,
            env={**kept, **extra},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    call.folder = tmp_path
    yield call
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def results(folder):
    """What each rank has written, one entry a round."""
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("rank-*"))]


@two_cores
@pytest.mark.slow  # the last test here is the same through the command, without torch in the workers
def test_bound_workers_are_started_again_after_a_failure(start):
    job = start(1, slots=2, max_restarts=1, binding=["--bind_cores_to_rank"])
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 0, errors
    ranks = results(start.folder)
    assert [len(rounds) for rounds in ranks] == [2, 2]
    for rank, rounds in enumerate(ranks):
        for seen in rounds:
            assert (seen["total"], seen["world"]) == (3, 2)
            assert seen["argv"] == [f"--local_rank={rank}", *ARGUMENTS]
            assert seen["threads"] == str(len(seen["cores"]))
    first, second = (rounds[-1]["cores"] for rounds in ranks)
    assert not set(first) & set(second)
    assert len(first) == len(second) == len(read_machine().cores()) // 2
    assert "OMP_NUM_THREADS" not in errors  # neither torch's warning nor a note of the binder


@pytest.mark.slow
def test_the_job_ends_when_no_restart_is_left(start):
    job = start(9, slots=2, max_restarts=1, threads=1)
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 1
    assert "exitcode  : 5" in errors
    assert [len(rounds) for rounds in results(start.folder)] == [2, 2]


@pytest.mark.slow  # two launchers of torch, and twice their workers
@pytest.mark.slow
def test_two_hosts_are_one_job_and_restart_together(start):
    endpoint = ("127.0.0.1", free_port())
    options = {"slots": 1, "max_restarts": 1, "nodes": (1, 2), "endpoint": endpoint, "threads": 1}
    jobs = [start(1, first=first, address="127.0.0.1", **options) for first in (True, False)]
    for job in jobs:
        _, errors = job.communicate(timeout=110)
        assert job.returncode == 0, errors
    ranks = results(start.folder)
    assert [[seen["total"] for seen in rounds] for rounds in ranks] == [[3, 3], [3, 3]]


FAILS_ONCE = """
import os, sys
round, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
with open(f"cli-{round}-{rank}", "w") as file:
    file.write(repr((sys.argv[1:], sorted(os.sched_getaffinity(0)))))
if round == "0" and rank == "1":
    sys.exit(9)
"""


@two_cores
def test_the_command_restarts_bound_workers(tmp_path):
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    options = ["--num_accelerators", "2", "--bind_cores_to_rank", "--max-restarts", "1"]
    command = [sys.executable, "-m", "anyaccel", "run", *options, "train.py", *ARGUMENTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    cores = [share.id for share in read_machine().cores()]
    for rank in (0, 1):
        arguments, mine = ast.literal_eval((tmp_path / f"cli-1-{rank}").read_text())
        assert arguments == [f"--local_rank={rank}", *ARGUMENTS]
        assert mine == sorted(cores[rank * (len(cores) // 2) : (rank + 1) * (len(cores) // 2)])
