# SPDX-License-Identifier: Apache-2.0
"""The hierarchical group with hosts that are said, not real: what fails, what is chosen.

Those of tests/cluster are real.
"""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import errors
from anyaccel.comm import heartbeat as heartbeat_module
from anyaccel.comm import hierarchy, shm
from anyaccel.inference.hf.group import gather_hosts
from anyaccel.inference.native.loading_watch import LoadingRanks
from collective_cases import CASES, oneccl_folder, run_cases

QUICK = [
    name
    for name, case in CASES.items()
    if case.dtype is None or (case.dtype in (torch.float32, torch.bool) and case.operation in ("", "SUM", "AVG", "MAX"))
]


def pretend(hosts: tuple[int, ...]) -> None:
    """From here on, groups of this process take it to be on this host."""
    shm.host_identity = lambda: f"host {hosts[dist.get_rank()]}"


def cases(hosts: tuple[int, ...]) -> dict[str, str]:
    pretend(hosts)
    return {name: text for name, text in run_cases("shm", QUICK).items() if text}


@pytest.mark.parametrize(
    "hosts",
    [
        (0, 0, 1),
        pytest.param((0, 1), marks=pytest.mark.slow),
        pytest.param((0, 1, 0, 1), marks=pytest.mark.slow),
        pytest.param((0, 1, 1, 2, 2, 2, 2, 0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results(hosts: tuple[int, ...]) -> None:
    assert ranks.run(cases, len(hosts), hosts, timeout=180) == [{}] * len(hosts)


def kinds(between: str) -> tuple[str, str, int, str]:
    pretend((0, 0, 1))
    group = dist.new_group(backend="shm")
    near = dist.new_group([0, 1], backend="shm")
    assert isinstance(group, hierarchy.HierarchicalGroup)
    tensor = torch.full((3000,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == 6).all())
    leaders = "" if group.leaders is None else type(group.leaders).__name__
    return type(group.flat).__name__, leaders, len(group.hosts), type(near).__name__


def test_groups_are_chosen_by_where_their_members_are() -> None:
    found = ranks.run(kinds, 3, "gloo")
    assert [row[1] for row in found] == ["ProcessGroupGloo", "", "ProcessGroupGloo"]
    assert {row[2] for row in found} == {2}
    assert [row[3] for row in found[:2]] == ["ShmProcessGroup"] * 2


def test_oneccl_between_hosts() -> None:
    folder = oneccl_folder()
    if folder is None:
        pytest.skip("no oneCCL: tools/install_test_tools.sh brings it")
    found = ranks.run(kinds, 3, "ccl", CCL_ROOT=str(folder), ANYACCEL_BETWEEN_HOSTS="ccl")
    assert [row[1] for row in found] == ["CclGroup", "", "CclGroup"]


def until_error(victim: int) -> None:
    pretend((0, 0, 1))
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=6))
    dist.all_reduce(torch.ones(1000), group=group)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.CommError) as caught:
        for _ in range(3):
            dist.all_reduce(torch.ones(1000), group=group)
    os.write(1, f"told: {type(caught.value).__name__}: {caught.value}\n".encode())
    os._exit(17)  # the group is gone, so the usual barrier at the end would hang


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_dead_rank_is_an_error_on_every_host(tmp_path: Path, victim: int) -> None:
    outcome = ranks.finish(ranks.start(until_error, 3, (victim,), tmp_path), tmp_path, 60)
    assert [code for rank, (code, _) in enumerate(outcome) if rank != victim] == [17, 17], outcome
    assert all("told: " in output for rank, (_, output) in enumerate(outcome) if rank != victim)
    elsewhere = [output for rank, (_, output) in enumerate(outcome) if (rank == 2) != (victim == 2)]
    assert any(f"PeerLostError: rank {0 if victim == 2 else 2} of 3: between hosts: rank {victim} on " in output
               for output in elsewhere), outcome  # fmt: skip


def until_silent(folder: Path) -> None:
    pretend((0, 0, 1))
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(10), group=group)
    if dist.get_rank() == 2:
        ranks.mark(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(errors.CommTimeoutError) as caught:
        dist.all_reduce(torch.ones(10), group=group)
    os.write(1, f"told: {caught.value}\n".encode())
    os._exit(17)


def test_a_stopped_rank_is_named_with_its_host(tmp_path: Path) -> None:
    processes = ranks.start(until_silent, 3, (tmp_path,), tmp_path)
    for process in processes[:2]:
        process.join(60)
    processes[2].kill()
    outcome = ranks.finish(processes, tmp_path, 10)
    host = os.uname().nodename
    told = f"rank 2 on {host} has not been heard of for [23] s; is it, or its host, stopped or cut off?"
    assert all(re.search(told, output) for _, output in outcome[:2]), outcome


def load_apart(victim: str) -> str:
    """Ranks that load, of which the last one takes longer than the deadline, or does not come."""
    pretend((0, 0, 1))
    heartbeat_module._BEAT_SECONDS = 0.2
    group = dist.new_group(backend="shm")
    watch = heartbeat_module.get_heartbeat(group, gather_hosts(group))
    assert watch is not None and watch.names()[2] == f"rank 2 on {os.uname().nodename}"
    loading = LoadingRanks(watch, dist.get_rank(), 2)
    if dist.get_rank() == 2:
        if victim == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif victim == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        end = time.monotonic() + 3.5
        while time.monotonic() < end:  # it works
            loading.check()
    try:
        loading.meet()
    except errors.CommError as error:
        os.write(1, f"told: {type(error).__name__}: {error}\n".encode())
        os._exit(17)
    return "met"


def test_a_load_may_take_longer_than_the_deadline() -> None:
    assert ranks.run(load_apart, 3, "slow") == ["met"] * 3


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("stopped", "CommTimeoutError: rank 2 on {} has not been heard of for 2 s while the model is loaded"),
        ("killed", "PeerLostError: rank 2 on {} ended or left, while this rank waited for it"),
    ],
)
def test_a_rank_that_is_lost_while_it_loads_is_named(tmp_path: Path, how: str, told: str) -> None:
    processes = ranks.start(load_apart, 3, (how,), tmp_path)
    for process in processes[:2]:
        process.join(60)
    processes[2].kill()
    outcome = ranks.finish(processes, tmp_path, 10)
    assert all(told.format(os.uname().nodename) in output for _, output in outcome[:2]), outcome
