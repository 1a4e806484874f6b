# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a group of the `shm` backend is an error that names the cause, in time, and leaves nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import _native, comm, errors

COLLECTIVES: dict[str, Callable[[dist.ProcessGroup, int], object]] = {
    "all_reduce": lambda group, n: dist.all_reduce(torch.ones(n), group=group),
    "broadcast": lambda group, n: dist.broadcast(torch.ones(n), 0, group=group),
    "reduce": lambda group, n: dist.reduce(torch.ones(n), 0, group=group),
    "all_gather": lambda group, n: dist.all_gather(
        [torch.ones(n) for _ in range(group.size())], torch.ones(n), group=group
    ),
    "reduce_scatter": lambda group, n: dist.reduce_scatter(
        torch.ones(n), [torch.ones(n) for _ in range(group.size())], group=group
    ),
    "all_to_all": lambda group, n: dist.all_to_all(
        [torch.ones(n) for _ in range(group.size())], [torch.ones(n) for _ in range(group.size())], group=group
    ),
    "gather": lambda group, n: dist.gather(
        torch.ones(n),
        [torch.ones(n) for _ in range(group.size())] if group.rank() == 0 else None,
        dst=0,
        group=group,
    ),
    "scatter": lambda group, n: dist.scatter(
        torch.ones(n),
        [torch.ones(n) for _ in range(group.size())] if group.rank() == 0 else None,
        src=0,
        group=group,
    ),
    "barrier": lambda group, n: dist.barrier(group),
}


# Long enough for the steps before it on a loaded machine.
STOPPED_SECONDS = 4


def tell(text: str) -> None:
    os.write(1, text.encode())
    os._exit(17)  # the group is gone, so the usual barrier at the end would hang


def one_goes_wrong(victim: int, how: str, name: str, asynchronous: bool) -> None:
    # Who is killed is noticed, whatever the deadline; who is stopped is not, before it.
    group = comm.new_group(backend="shm", timeout=timedelta(seconds=1000 if how == "kill" else STOPPED_SECONDS))
    rank = group.rank()
    for step in range(1_000_000):
        if rank == victim and step == 20:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGSTOP)
        started = time.monotonic()
        try:
            if asynchronous:
                work = dist.all_reduce(torch.ones(5000), group=group, async_op=True)
                assert work is not None
                work.wait()
            else:
                COLLECTIVES[name](group, 5000)
        except errors.CommError as error:
            waited = time.monotonic() - started
            with pytest.raises(errors.CommError, match="broken by an earlier error"):
                dist.barrier(group)
            tell(f"{type(error).__name__}|{waited:.2f}|{error}")


def outcome_of(victim: int, how: str, name: str, tmp_path: Path, world: int, asynchronous: bool = False) -> list[str]:
    processes = ranks.start(one_goes_wrong, world, (victim, how, name, asynchronous), tmp_path)
    if how == "stop":  # until the others are done with it
        for rank, process in enumerate(processes):
            if rank != victim:
                process.join(60)
        stopped = processes[victim].pid
        assert stopped is not None
        os.kill(stopped, signal.SIGCONT)
    outcome = ranks.finish(processes, tmp_path, timeout=60)
    assert outcome[victim][0] == (-signal.SIGKILL if how == "kill" else 17), outcome
    for rank, (code, output) in enumerate(outcome):
        assert code == 17 or rank == victim, output
    return [output for _, output in outcome]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_each_rank_killed(victim: int, tmp_path: Path) -> None:
    outputs = outcome_of(victim, "kill", "all_reduce", tmp_path, 3, asynchronous=victim == 1)
    kinds = []
    for rank, output in enumerate(outputs):
        if rank == victim:
            continue
        kind, _, text = output.split("|", 2)
        kinds.append(kind)
        # Who notices it first tells the others, who may hear of it from that one.
        assert f"rank {victim}" in text
        assert "ended" in text
        assert "all_reduce of 5000 float32" in text
    assert "PeerLostError" in kinds


def most_are_slow(names: list[str], quick: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name", most_are_slow([name for name in COLLECTIVES if name != "all_reduce"], ("broadcast", "all_to_all"))
)
def test_a_rank_killed_in_each_collective(name: str, tmp_path: Path) -> None:
    (text,) = [text for rank, text in enumerate(outcome_of(1, "kill", name, tmp_path, 2)) if rank == 0]
    assert text.startswith("PeerLostError|")
    assert name in text


@pytest.mark.parametrize("victim", [0, 1])
def test_each_rank_stopped_past_the_deadline(victim: int, tmp_path: Path) -> None:
    outputs = outcome_of(victim, "stop", "all_gather", tmp_path, 3)
    for rank, output in enumerate(outputs):
        kind, waited, text = output.split("|", 2)
        if rank == victim:
            assert kind == "CommError"
            assert "has given up because rank" in text
        else:
            assert f"rank {victim}" in text
            assert "did not come" in text
            assert float(waited) > 1
    in_time = f"did not come within the timeout of {STOPPED_SECONDS} s"
    assert any(output.startswith("CommTimeoutError") and in_time in output for output in outputs)


def never_joins(folder: Path) -> None:
    rank = comm.get_rank()
    if rank == 2:
        ranks.wait_for_marks(folder, 0, 1)
        os._exit(0)
    try:
        comm.new_group([0, 1, 2], backend="shm", timeout=timedelta(seconds=1.5))
    except errors.CommError as error:
        os.write(1, f"|{type(error).__name__}: {error}".encode())
        ranks.mark(folder)
        ranks.wait_for_marks(folder, 0, 1)  # torch's store is with rank 0
        os._exit(17)


def test_a_rank_that_never_joins(tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(never_joins, 3, (tmp_path,), tmp_path), tmp_path, timeout=60)
    for rank, (code, output) in enumerate(outcome[:2]):
        assert code == 17, output
        # On a busy machine the other one may be late too; and rank 1 knows of nobody without rank 0.
        named = r"(1, )?2" if rank == 0 else r"((0, )?2|0)"
        assert re.search(rf"\|CommTimeoutError: rank {named} of 3 did not join the group within 1\.5 s$", output), (
            output
        )


def different_calls(what: str) -> None:
    group = comm.new_group(backend="shm", timeout=timedelta(seconds=60))
    other = group.rank() == 1
    guard = torch.full((64,), 7.0)
    try:
        if what == "all_to_all splits":
            mine = [3, 1] if other else [1, 1]
            dist.all_to_all_single(torch.empty(2), torch.empty(sum(mine)), [1, 1], mine, group=group)
        elif what == "all_gather sizes":
            sizes = [2, 5] if other else [2, 4]
            dist.all_gather([torch.empty(n) for n in sizes], torch.empty(sizes[group.rank()]), group=group)
        elif what == "root":
            dist.broadcast(guard, group_src=group.rank(), group=group)
        elif what == "dtype":
            dist.all_reduce(guard.to(torch.float64) if other else guard, group=group)
        elif what == "op":
            dist.all_reduce(guard, dist.ReduceOp.MAX if other else dist.ReduceOp.SUM, group=group)
        elif what == "operation":
            (COLLECTIVES["barrier"] if other else COLLECTIVES["gather"])(group, 3)
        else:
            COLLECTIVES[what](group, 400 if other else 300)
    except errors.CommError as error:
        assert bool((guard == 7).all())
        tell(str(error))
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("all_reduce", ("300 float32", "400 float32")),
        ("reduce_scatter", ("300 float32", "400 float32")),
        *[
            pytest.param(name, ("300 float32", "400 float32"), marks=pytest.mark.slow)
            for name in ("broadcast", "reduce", "all_gather", "gather", "scatter")
        ],
        ("all_to_all", ("elements to rank", "expects")),
        ("all_to_all splits", ("sends 3 elements to rank 0, which expects 1",)),
        ("all_gather sizes", ("expects 4 elements of rank 1", "expects 5")),
        ("root", ("from rank 0", "from rank 1")),
        ("dtype", ("64 float32", "64 float64")),
        ("op", ("with max",)),
        ("operation", ("gather of 3 float32", "barrier")),
    ],
)
def test_calls_that_differ_are_named(what: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(different_calls, 2, (what,), tmp_path), tmp_path, timeout=60)
    # What is right for a rank of an all_to_all can be wrong for another.
    assert outcome[0][0] == 17, outcome
    assert outcome[1][0] == 17 or what == "all_to_all splits", outcome
    named = [output for _, output in outcome if "ranks disagree" in output]
    assert named, outcome
    assert any(all(text in output for text in texts) for output in named), outcome


def monitored(folder: Path) -> None:
    group = comm.new_group(backend="shm")
    comm.monitored_barrier(group)
    if group.rank() in (1, 3):
        ranks.wait_for_marks(folder, 0, 2)
        os._exit(0)
    try:
        comm.monitored_barrier(group, timedelta(seconds=1))
    except errors.CommError as error:
        ranks.mark(folder)
        tell(str(error) if isinstance(error, errors.CommTimeoutError) else f"later: {error}")


def test_monitored_barrier_names_who_is_missing(tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(monitored, 4, (tmp_path,), tmp_path), tmp_path, timeout=60)
    texts = [outcome[rank][1] for rank in (0, 2)]
    assert any(
        "rank 1 (pid" in text and "rank 3 (pid" in text and "within the timeout of 1 s" in text for text in texts
    ), outcome


def aborted(folder: Path) -> None:
    group = comm.new_group(backend="shm")

    def abort() -> None:
        comm.abort(group)
        ranks.mark(folder)

    if group.rank() == 0:
        threading.Timer(0.3, abort).start()
    if group.rank() == 2:
        ranks.wait_for_marks(folder, 0)
    # Who has all that it needs, of a rank that aborts while it waits for others, is told by the next call.
    with pytest.raises(errors.CommError, match=r"abort|given up after an error"):
        for _ in range(1 if group.rank() == 0 else 2):
            dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(errors.CommError):
        dist.all_reduce(torch.ones(3), group=group)
    comm.destroy_process_group(group)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # another group goes on
    assert tensor.item() == 3


def test_abort_ends_every_wait(tmp_path: Path) -> None:
    ranks.run(aborted, 3, tmp_path)


FULL = """
import os, torch, torch.distributed as dist
from pathlib import Path
from anyaccel import comm
comm.init_distributed("shm")
tensor = torch.ones(1_000_000)
comm.inference_all_reduce(tensor)
assert bool((tensor == 2).all())
symmetric = comm.symm_zeros(1_000_000)
comm.inference_all_reduce(symmetric)
print([p.name for p in Path("/dev/shm").iterdir() if p.name.startswith("anyaccel")])
dist.barrier()
comm.destroy_process_group()
"""


def test_dev_shm_full(tmp_path: Path) -> None:
    """A container's /dev/shm of a few pages, all taken."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("another /dev/shm needs root and util-linux")
    script = tmp_path / "job.py"
    script.write_text(FULL)
    ranks_of_job = " & ".join(
        f"RANK={rank} LOCAL_RANK={rank} {sys.executable} -W ignore {script} > {tmp_path}/{rank} 2>&1" for rank in (0, 1)
    )
    command = (
        "mount -t tmpfs -o size=16k tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/full bs=4k count=4 status=none; "
        f"{ranks_of_job} & wait"
    )
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ranks.free_port()),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], env=env, timeout=100, capture_output=True, text=True, check=False
    )
    if "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["[]\n", "[]\n"], done.stderr


# A filter of seccomp: `memfd_create` ends with EPERM, as the profiles of some sandboxes have it.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def forbid_memfd() -> None:
    number = _MEMFD_CREATE[platform.machine()]
    load_number, if_equal, answer = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *line)
        for line in [(load_number, 0, 0, 0), (if_equal, 0, 1, number), (answer, 0, 0, 0x50000 | errno.EPERM),
                     (answer, 0, 0, 0x7FFF0000)]
    )  # fmt: skip
    code = ctypes.create_string_buffer(program)
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filters) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def without_memfd(some: bool) -> list[float]:
    rank = dist.get_rank()
    if not some or rank == 0:
        forbid_memfd()
        with pytest.raises(PermissionError):
            os.memfd_create("x")
        assert _native.ShmSegment.create(4096, True).name.startswith("/anyaccel-")  # as a model of one rank has it
    group = dist.new_group(backend="shm")
    tensor = torch.full((70_000,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    symmetric = comm.symm_zeros(1000, group=group)
    symmetric += rank + 1
    dist.all_reduce(symmetric, group=group)
    return [tensor.mean().item(), symmetric.mean().item()]


@pytest.mark.skipif(platform.machine() not in _MEMFD_CREATE, reason="the number of memfd_create here is not known")
@pytest.mark.parametrize("some", [False, True], ids=["on all ranks", "on one rank"])
def test_where_memfd_create_is_forbidden_a_file_in_dev_shm_does(some: bool) -> None:
    assert ranks.run(without_memfd, 2, some) == [[3.0, 3.0]] * 2
