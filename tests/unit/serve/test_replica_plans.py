# SPDX-License-Identifier: Apache-2.0
"""Which cores and memory the replicas of a server get, on machines of every kind that are written as trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anyaccel import topology
from anyaccel.inference.options import ModelOptions
from anyaccel.inference.ranks.control import plan_ranks
from anyaccel.serve.engine import opening
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.interface import ModelFacts
from anyaccel.topology import Machine, read_machine
from sysfs_trees import MACHINES, Spec, build

pytestmark = pytest.mark.many_files

Share = tuple[tuple[int, ...], str, tuple[int, ...]]  # cores, and where the memory comes from


def on(monkeypatch: pytest.MonkeyPatch, spec: Spec, root: Path) -> Machine:
    build(spec, root)
    machine = read_machine(root)
    monkeypatch.setattr(topology, "read_machine", lambda: machine)
    return machine


def shares(tp: int, replicas: int) -> list[list[Share]]:
    """Of the ranks of each replica."""
    found = []
    for replica in range(replicas):
        plan, _ = plan_ranks(ModelOptions(tp=tp), replica, replicas)
        assert plan.world_size == tp and [binding.rank for binding in plan.ranks] == list(range(tp))
        assert len({binding.env["MASTER_PORT"] for binding in plan.ranks} - {"0"}) == 1
        for binding in plan.ranks:
            assert not binding.cores or binding.env["OMP_NUM_THREADS"] == str(len(binding.cores))
        found.append([(binding.cores, binding.memory_policy, binding.memory_nodes) for binding in plan.ranks])
    cores = [core for replica in found for rank in replica for core in rank[0]]
    assert len(cores) == len(set(cores))  # nobody has what another one has
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("two sockets", [(range(8), "bind", 0), (range(8, 16), "bind", 1)]),
        ("interleaved", [(range(0, 16, 2), "bind", 0), (range(1, 16, 2), "bind", 1)]),
        ("snc4", [(range(3 * node, 3 * node + 3), "bind", node) for node in range(8)]),
        ("xeon max, flat", [(range(8), "preferred", 2), (range(8, 16), "preferred", 3)]),  # HBM is a node of its own
        ("fake numa, two sockets", [(range(4), "bind", (0, 1)), (range(4, 8), "bind", (2, 3))]),
        ("cxl", [(range(4), "bind", 0), (range(4, 8), "bind", 1)]),  # a node that has no cores
        ("memory of a GPU", [(range(4), "bind", 0), (range(4, 8), "bind", 8)]),
        ("smt8", [((0, 8, 16), "bind", 0), ((24, 32, 40), "bind", 8)]),
        ("a node without memory", [(range(4), "bind", 0), (range(4, 8), "default", ())]),
        ("eight gpus", [(range(8 * node, 8 * node + 8), "bind", node) for node in range(4)]),
        # Nodes that have not as many cores as others: no core is left over for that.
        ("off-line cores", [((0, 2, 3), "bind", 0), ((4, 6, 7, 13), "bind", 1)]),
        ("cpuset", [((1,), "default", ()), ((5, 6, 7), "bind", 1)]),
        ("a node without online cores", [((0, 1), "bind", 0)]),
        ("vm without nodes", [((0, 1), "default", ())]),
    ],
)
def test_auto_is_a_replica_on_the_cores_and_memory_of_each_node(
    name: str, expected: list[tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = on(monkeypatch, MACHINES[name], tmp_path)
    opened: list[tuple[int, int]] = []

    class Engine:
        """In place of one that has a thread; it loads its decoder as that one does."""

        cache_pages = 1
        state_pages = 0

        def __init__(self, load: Any, settings: EngineSettings, *_: object) -> None:
            load(lambda: None)
            self.facts = ModelFacts(1, 1, frozenset(), 1, "fp32", ("plan: one process",))

    def load(*arguments: Any) -> None:
        settings, replica = arguments[3], arguments[-1]
        opened.append((replica, settings.replicas))

    monkeypatch.setattr(opening, "ServingEngine", Engine)
    monkeypatch.setattr(opening, "open_decoder", load)
    opening.open_engine(Path("model"), ModelOptions(), None, EngineSettings(replicas=0))  # type: ignore[arg-type]
    count = len(machine.nodes_with_cores())
    assert opened == [(replica, count) for replica in range(count)]
    nodes = [each if isinstance(each, tuple) else (each,) for _, _, each in expected]
    assert shares(1, count) == [
        [(tuple(cores), policy, each)] for (cores, policy, _), each in zip(expected, nodes, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "tp", "replicas", "expected"),
    [
        ("two sockets", 2, 2, [[(0, 1, 2, 3), (4, 5, 6, 7)], [(8, 9, 10, 11), (12, 13, 14, 15)]]),
        ("two sockets", 1, 4, [[(0, 1, 2, 3)], [(4, 5, 6, 7)], [(8, 9, 10, 11)], [(12, 13, 14, 15)]]),
        ("four sockets", 2, 2, [[(0, 1, 2, 3), (4, 5, 6, 7)], [(8, 9, 10, 11), (12, 13, 14, 15)]]),
        ("off-line cores", 2, 2, [[(0,), (2,)], [(4, 6), (7, 13)]]),  # ranks of one model have as many as each other
        ("cpuset", 2, 2, [[(1,), (5,)], [(6,), (7,)]]),  # a node has one core for two ranks
        ("one socket", 1, 2, [[(0, 1)], [(2, 3)]]),
    ],
)
def test_ranks_of_a_replica_are_beside_each_other(
    name: str,
    tp: int,
    replicas: int,
    expected: list[list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    on(monkeypatch, MACHINES[name], tmp_path)
    assert [[rank[0] for rank in replica] for replica in shares(tp, replicas)] == expected


def test_replicas_that_share_cores_share_the_threads_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    on(monkeypatch, MACHINES["smt2"], tmp_path)  # six cores of two threads
    plans = [plan_ranks(ModelOptions(), replica, 8)[0] for replica in range(8)]
    assert {(plan.bound, plan.ranks[0].env["OMP_NUM_THREADS"]) for plan in plans} == {(False, "1")}
