# SPDX-License-Identifier: Apache-2.0
"""On a machine of each shape: what we read of it beside what hwloc reads, and each kind of plan beside the kernel."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest
from binding import COMMAND, WHERE, check, numbers, on, plan
from machine import Machine


def _objects(root: ElementTree.Element, kind: str) -> Iterator[ElementTree.Element]:
    return (each for each in root.iter("object") if each.get("type") == kind)


def _bits(mask: str) -> list[int]:
    """The numbers of a mask as hwloc writes it, 32 bits a word, the highest first."""
    words = [int(word, 16) if word else 0 for word in mask.split(",")]
    return [32 * at + bit for at, word in enumerate(reversed(words)) for bit in range(32) if word >> bit & 1]


def test_the_machine_is_what_hwloc_says(machine: Machine) -> None:
    if machine.run(["which", "lstopo-no-graphics"]).status:
        pytest.skip("needs hwloc: apt-get install hwloc-nox")
    root = ElementTree.fromstring(machine.check(["lstopo-no-graphics", "--of", "xml", "-"]).out)
    ours = json.loads(machine.anyaccel("topo", "--json").out)
    by_core: dict[int, list[int]] = {}
    for cpu in ours["cpus"]:
        by_core[cpu["core"]] = cpu["siblings"]
    assert sorted(by_core.values()) == sorted(_bits(str(each.get("cpuset"))) for each in _objects(root, "Core"))
    packages: dict[int, list[int]] = {}
    for cpu in ours["cpus"]:
        packages.setdefault(cpu["package"], []).append(cpu["id"])
    assert sorted(packages.values()) == sorted(_bits(str(each.get("cpuset"))) for each in _objects(root, "Package"))
    theirs = {int(str(each.get("os_index"))): each for each in _objects(root, "NUMANode")}
    # hwloc drops a node without memory where a group of cores is one node's.
    assert [node["id"] for node in ours["nodes"] if node["id"] in theirs or node["memory_bytes"]] == sorted(theirs)
    for node in ours["nodes"]:
        if node["id"] in theirs:
            assert node["memory_bytes"] == int(theirs[node["id"]].get("local_memory") or 0), node
    shared = {(each.get("type"), tuple(_bits(str(each.get("cpuset"))))) for each in _objects(root, "L3Cache")}
    assert {("L3Cache", tuple(each["cpus"])) for each in ours["caches"] if each["name"] == "L3"} == shared


PLANS: tuple[tuple[str, ...], ...] = (
    ("--bind_cores_to_rank",),
    ("--bind_cores_to_rank", "--num_accelerators", "2"),
    ("--bind_cores_to_rank", "--num_accelerators", "3"),
    ("--bind_cores_to_rank", "--num_accelerators", "8", "--smt"),
    ("--bind_cores_to_rank", "--cores-reserved", "1"),
    ("--bind_core_list", "1-3", "--num_accelerators", "2"),
    ("--bind_cores_to_rank", "--mem-policy", "bind", "--num_accelerators", "4"),
    ("--bind_cores_to_rank", "--mem-policy", "preferred"),
    ("--bind_cores_to_rank", "--mem-policy", "interleave", "--num_accelerators", "2"),
    ("--bind_cores_to_rank", "--mem-policy", "none", "--num_accelerators", "2"),
    ("--num_accelerators", "2"),
)


# On a machine that takes a minute for each; test_crowds.py has a rank for each of its CPUs.
OF_MANY_CPUS = (PLANS[0], PLANS[3], PLANS[8])


@pytest.mark.parametrize("options", PLANS, ids=" ".join)
def test_each_rank_is_where_its_plan_says(machine: Machine, options: tuple[str, ...]) -> None:
    if machine.shape.name == "many-cpus" and options not in OF_MANY_CPUS:
        pytest.skip("one of each kind is enough there")
    check(machine, options)


def test_workers_are_as_many_as_nodes_with_cores_and_none_is_divided(machine: Machine) -> None:
    """Without a number of workers, each node with cores gets one, and that has no core of another node."""
    shown = json.loads(machine.anyaccel("topo", "--json", "--bind_cores_to_rank").out)
    with_cores = [node for node in shown["nodes"] if node["cpus"]]
    assert shown["plan"]["world_size"] == len(with_cores)
    of = {cpu["id"]: cpu["node"] for cpu in shown["cpus"]}
    if len({len(node["cpus"]) for node in with_cores}) == 1:
        assert all(len({of[core] for core in rank["cores"]}) == 1 for rank in shown["plan"]["ranks"])


@on("hbm-flat")
def test_memory_of_high_bandwidth_comes_first_and_ordinary_memory_when_it_is_full(machine: Machine) -> None:
    planned, _ = plan(machine, ["--bind_cores_to_rank"])
    assert [rank["memory"] for rank in planned["ranks"]] == [
        {"policy": "preferred", "nodes": [2]},
        {"policy": "preferred", "nodes": [3]},
    ]
    found = machine.check([COMMAND, "run", "--bind_cores_to_rank", WHERE, "--megabytes", "600"])
    for line in found.json_lines():
        own = int(line["env"]["RANK"])
        pages = {int(node): count for node, count in line["pages"].items()}
        assert set(pages) == {own, own + 2}, pages  # the rest comes from the nearest node, that of its cores
        assert pages[own + 2] > 350 << 8, pages


@on("cores-offline")
def test_cores_that_are_off_line_are_in_no_plan(machine: Machine) -> None:
    planned = check(machine, ["--bind_cores_to_rank", "--num_accelerators", "2"])
    assert [rank["cores"] for rank in planned["ranks"]] == [[0, 1, 3], [4, 6, 7]]
    refused = machine.anyaccel("run", "--bind_core_list", "0-3", "--dry-run", WHERE)
    assert refused.status == 2
    assert "2" in refused.err


@on("isolated")
def test_isolated_cpus_have_to_be_asked_for(machine: Machine) -> None:
    two = ["--bind_core_list", "2-3"]
    _, refused = plan(machine, two)
    assert refused.status == 2
    assert "`taskset -c 2-3`" in refused.err
    planned = check(machine, two, ["taskset", "-c", "2-3"])
    assert "CPUs 2-3 are isolated" in planned["warnings"][0]
    assert not check(machine, [*two, "--num_accelerators", "2"], ["taskset", "-c", "2-3"])["warnings"]


@on("isolated")
def test_a_node_whose_cores_are_all_off_line_is_no_far_memory(machine: Machine) -> None:
    assert "all of its CPUs (6-7) are off-line" in machine.anyaccel("topo").out


@on("smt")
def test_threads_of_a_core_stay_together(machine: Machine) -> None:
    shown = json.loads(machine.anyaccel("topo", "--json").out)
    siblings = {cpu["id"]: cpu["siblings"] for cpu in shown["cpus"]}
    assert all(len(each) == 2 for each in siblings.values())
    one = check(machine, ["--bind_cores_to_rank", "--num_accelerators", "4"])
    assert all(len(rank["cores"]) == 2 for rank in one["ranks"])
    both = check(machine, ["--bind_cores_to_rank", "--num_accelerators", "4", "--smt"])
    for rank in both["ranks"]:
        assert sorted(rank["cores"]) == sorted({cpu for core in rank["cores"] for cpu in siblings[core]})


@on("core-complexes")
def test_a_rank_has_the_cores_that_share_a_cache(machine: Machine) -> None:
    planned = check(machine, ["--bind_cores_to_rank", "--num_accelerators", "4"])
    assert [rank["cores"] for rank in planned["ranks"]] == [numbers(f"{4 * at}-{4 * at + 3}") for at in range(4)]
