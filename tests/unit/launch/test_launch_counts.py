# SPDX-License-Identifier: Apache-2.0
"""Counts from outside that no machine has: one short line at once, before anything is made of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anyaccel.cli.bind import main as bind
from anyaccel.cli.run import build_parser
from anyaccel.errors import UsageError
from anyaccel.launch.cluster.cluster import ClusterOptions
from anyaccel.launch.cluster.hostfile import parse_hostfile, select_hosts
from anyaccel.launch.counts import MOST_IN_A_JOB, MOST_ON_A_HOST, parse_count, shorten
from anyaccel.launch.plan.local_rank import rank_from_environment, slurm_tasks
from anyaccel.launch.plan.numeric import openmp_binding
from anyaccel.launch.plan.options import LaunchOptions

HUGE = [MOST_IN_A_JOB + 1, 10**9, 11111111111111111111111, 10**4000]
PLACES: dict[str, Callable[[int], object]] = {
    "--num_accelerators": lambda count: LaunchOptions("x.py", num_accelerators=count),
    "--num_nodes": lambda count: ClusterOptions(num_nodes=count),
    "bind --local_size": lambda count: bind(["--local_rank", "0", "--local_size", str(count), "--", "true"]),
    "bind --dry-run": lambda count: bind(["--local_size", str(count), "--dry-run"]),
    "LOCAL_WORLD_SIZE": lambda count: rank_from_environment({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(count)}),
    "LOCAL_RANK": lambda count: rank_from_environment({"LOCAL_RANK": str(count), "LOCAL_SIZE": "2"}),
    "SLURM_TASKS_PER_NODE": lambda count: rank_from_environment(
        {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": f"1,{count}"}
    ),
    "SLURM_NODEID": lambda count: rank_from_environment(
        {"SLURM_LOCALID": "0", "SLURM_NODEID": str(count), "SLURM_TASKS_PER_NODE": f"1(x{count})"}
    ),
    "slots=": lambda count: parse_hostfile(f"node1 slots={count}\n", "hosts"),
    "--include": lambda count: select_hosts({"node1": 2}, include=f"node1:0-{count}"),
}


@pytest.mark.parametrize("count", HUGE, ids=["2**20+1", "1e9", "23 digits", "4001 digits"])
@pytest.mark.parametrize("place", PLACES)
def test_a_count_that_cannot_be_is_a_short_line(place: str, count: int) -> None:
    with pytest.raises(UsageError) as refused:
        PLACES[place](count)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 4500


def test_a_long_word_is_cut_in_what_the_parser_says() -> None:
    with pytest.raises(UsageError, match=r"invalid int value: '9{30,}.*see anyaccel run --help$") as refused:
        build_parser().parse_args(["--num_accelerators", "9" * 5000, "x.py"])
    assert len(str(refused.value)) < 500


def test_hosts_that_are_more_than_a_job_has() -> None:
    hosts = {f"node{number}": MOST_ON_A_HOST for number in range(17)}
    with pytest.raises(UsageError, match=r"^1114112 slots on 17 hosts: a job has at most 1048576 workers"):
        select_hosts(hosts)


def test_nodes_far_behind_this_one_cost_nothing() -> None:
    assert slurm_tasks("2(x2000000000)", 2) == (2, 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("OMP_PLACES", "{0:65535}:65535"),
        ("OMP_PLACES", ",".join(["{0:65535}:65535"] * 5000)),
        ("GOMP_CPU_AFFINITY", "0-65535 " * 10000),
    ],
)
def test_cpus_that_are_named_by_the_billion(name: str, text: str) -> None:
    found, _, warnings = openmp_binding([(0, 1)], {name: text})
    assert found[0][name] in ("{0},{1}", "0-1")
    assert len(warnings) == 1


def test_numbers() -> None:
    assert [parse_count(text) for text in ("0", "12", "999999999999")] == [0, 12, 999999999999]
    assert [parse_count(text) for text in ("", "-1", "+1", " 1", "1_0", "²", "1e9", "9" * 13)] == [None] * 8
    assert shorten("a'b") == '"a\'b"'
    assert shorten("9" * 100) == f"'{'9' * 60}'... (100 characters)"
