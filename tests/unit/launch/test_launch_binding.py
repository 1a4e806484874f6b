# SPDX-License-Identifier: Apache-2.0
"""Planning on every kind of machine: the rules of docs/binding.md as properties, and each kind by example."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.errors import UsageError
from anyaccel.launch.plan.binding import CoreShares, bind_ranks, reserve_cores
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.topology import Cpu, Machine, NumaNode, read_machine
from sysfs_trees import MACHINES, Spec, build
from workers import memory_folder


@cache
def tree(name: str) -> Machine:
    return made(MACHINES[name])


def made(spec: Spec) -> Machine:
    with memory_folder() as folder:
        build(spec, Path(folder))
        return read_machine(folder)


def shares(machine: Machine, ranks: int, devices: tuple[int | None, ...] = (), **options: object) -> CoreShares:
    return bind_ranks(BindingOptions(**{"bind_cores": True, **options}), machine, ranks, devices)


def cores(found: CoreShares) -> list[tuple[int, ...]]:
    return [share.cores for share in found.ranks]


# properties


# Trees of hundreds of CPUs take long to write, and are no other case.
TREES = sorted(set(MACHINES) - {"two sockets of 56 cores", "eight sockets"})


@st.composite
def made_up(draw: st.DrawFn) -> Machine:
    """Nodes of different sizes whose cores have different threads and kinds; cut into several, or without memory."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    threads = draw(st.sampled_from([1, 2, 4, 8]))
    hybrid = draw(st.booleans())
    fake = draw(st.sampled_from([1, 1, 2]))
    cpus: list[Cpu] = []
    nodes: list[NumaNode] = []
    for index, size in enumerate(sizes):
        first = len(cpus)
        for core in range(size):
            siblings = tuple(range(len(cpus), len(cpus) + (1 if hybrid and core % 2 else threads)))
            kind = ("performance", "efficiency")[core % 2] if hybrid else ""
            cpus += [Cpu(cpu, index // 2, 0, core, index * fake, siblings, kind) for cpu in siblings]
        shown = tuple(range(first, len(cpus)))
        nodes += [NumaNode(index * fake + part, shown, 1 << 30) for part in range(fake)]
    memory = draw(st.sets(st.sampled_from([node.id for node in nodes])))
    return Machine(tuple(cpus), tuple(nodes), tuple(range(len(cpus))), tuple(sorted(memory)))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """A tree of `MACHINES`, or a made-up one, of which this process may use a part."""
    machine = tree(draw(st.sampled_from(TREES))) if draw(st.booleans()) else draw(made_up())
    allowed = draw(st.sets(st.sampled_from(machine.allowed_cpus), min_size=1)) if draw(st.booleans()) else None
    return machine if allowed is None else narrowed(machine, allowed)


def narrowed(machine: Machine, allowed: set[int]) -> Machine:
    return Machine(machine.cpus, machine.nodes, tuple(sorted(allowed)), machine.allowed_memory_nodes)


@given(machines(), st.booleans(), st.integers(0, 2), st.data())
def test_every_plan_keeps_the_rules(machine: Machine, smt: bool, reserved: int, data: st.DataObject) -> None:
    try:
        nodes, _ = reserve_cores(machine, reserved)
    except UsageError:
        assert all(len(node) <= reserved for node in machine.nodes_with_cores().values())
        return
    usable = [cpu for node in nodes.values() for cpu in node]
    ranks = data.draw(st.integers(1, len(usable)), "ranks")
    known = data.draw(st.booleans(), "devices")
    node = st.none() | st.sampled_from([node.id for node in machine.nodes])
    devices = tuple(data.draw(st.lists(node, min_size=ranks, max_size=ranks), "nodes")) if known else ()

    found = shares(machine, ranks, devices, smt=smt, cores_reserved=reserved)

    used = [cpu for share in cores(found) for cpu in share]
    core_of = {cpu.id: cpu.core for cpu in machine.cpus}
    node_of = {cpu.id: cpu.node for cpu in machine.cpus}
    mine = [{core_of[cpu] for cpu in share} for share in cores(found)]
    assert len(mine) == ranks
    assert all(mine)
    assert len(set(used)) == len(used)
    assert set(used) <= set(machine.allowed_cpus)
    # Cores are not shared either, and each has one thread, or all that are allowed.
    assert sum(map(len, mine)) == len(set().union(*mine))
    threads = Counter(core_of[cpu] for cpu in used)
    allowed = Counter(core_of[cpu] for cpu in machine.allowed_cpus)
    assert all(count == (allowed[core] if smt else 1) for core, count in threads.items())
    # Everything that may be used is used, left over or reserved.
    parts = [{core_of[cpu] for cpu in part} for part in (used, found.left_over, found.reserved)]
    assert set().union(*parts) == {cpu.core for cpu in machine.cores()}
    assert sum(map(len, parts)) == len(machine.cores())
    biggest = max(map(len, nodes.values()))
    for share in mine:
        assert len({node_of[core] for core in share}) == 1 or biggest < len(share)
    if not devices:
        assert len(set(map(len, mine))) == 1
    # Memory is where the cores are.
    for share in found.ranks:
        for policy_node in share.memory_nodes if share.memory_policy == "bind" else ():
            assert set(share.cores) <= set(machine.node(policy_node).cpus)
        assert set(share.memory_nodes) <= set(machine.allowed_memory_nodes)


@given(machines(), st.data())
def test_devices_decide_the_node(machine: Machine, data: st.DataObject) -> None:
    nodes = machine.nodes_with_cores()
    homes = st.sampled_from(sorted(nodes))
    devices = tuple(data.draw(st.lists(homes, min_size=1, max_size=8)))
    if max(Counter(devices).values()) > min(len(nodes[node]) for node in set(devices)) or len(nodes) == 1:
        return
    found = shares(machine, len(devices), devices)
    assert found.warnings == ()
    node_of = {cpu.id: cpu.node for cpu in machine.cpus}
    for node, share in zip(devices, cores(found), strict=True):
        assert {node_of[cpu] for cpu in share} == {node}
        assert len(share) == len(nodes[node]) // devices.count(node)


@given(machines(), st.sampled_from(["auto", "bind", "preferred", "interleave", "none"]), st.data())
def test_every_memory_policy_keeps_the_rules(machine: Machine, wanted: str, data: st.DataObject) -> None:
    some = data.draw(st.sets(st.sampled_from(machine.allowed_cpus), min_size=1))
    policy, nodes = memory_policy(machine, tuple(some), wanted)
    assert set(nodes) <= set(machine.allowed_memory_nodes)
    assert bool(nodes) == (policy != "default")
    assert wanted != "none" or policy == "default"
    if wanted != "auto":
        assert policy in (wanted, "default")


# spread


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("two sockets", 2, [tuple(range(8)), tuple(range(8, 16))]),
        ("two sockets", 4, [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]),
        ("snc4", 8, [(n, n + 1, n + 2) for n in range(0, 24, 3)]),
        ("snc4", 2, [tuple(range(12)), tuple(range(12, 24))]),
        ("fake numa", 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("interleaved", 2, [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]),
        ("smt8", 2, [(0, 8, 16), (24, 32, 40)]),
        ("off-line cores", 2, [(0, 2, 3), (4, 6, 7)]),
        ("cpuset", 1, [(5, 6, 7)]),  # three quarters of all four cores, without straddling
        ("cpuset", 2, [(1,), (5,)]),
        ("vm without nodes", 2, [(0,), (1,)]),
        ("a node without online cores", 2, [(0,), (1,)]),
    ],
)
def test_kinds_of_machine(name: str, ranks: int, expected: list[tuple[int, ...]]) -> None:
    found = shares(tree(name), ranks)
    assert cores(found) == expected


def test_all_threads_of_a_core() -> None:
    machine = tree("smt2")
    assert cores(shares(machine, 2, smt=True)) == [(0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)]
    assert cores(shares(narrowed(machine, {0, 6, 1, 8}), 3, smt=True)) == [(0, 6), (1,), (8,)]


# cores of the system


def test_reserved_cores_are_the_last_of_each_node() -> None:
    found = shares(tree("two sockets"), 2, cores_reserved=2)
    assert cores(found) == [tuple(range(6)), tuple(range(8, 14))]
    assert found.reserved == (6, 7, 14, 15)
    assert found.left_over == ()


@pytest.mark.parametrize(("name", "reserved"), [("hybrid", (22, 23)), ("big.LITTLE", (2, 3))])
def test_slow_cores_are_reserved_first_however_they_are_numbered(name: str, reserved: tuple[int, ...]) -> None:
    machine = tree(name)
    assert shares(machine, 1, cores_reserved=2).reserved == reserved
    assert {cpu.kind for cpu in machine.cpus if cpu.id in reserved} == {"efficiency"}


def test_reserving_everything() -> None:
    with pytest.raises(UsageError, match=r"--cores-reserved 8 leaves no core .* more than 8 cores .* reserve fewer"):
        shares(tree("two sockets"), 1, cores_reserved=8)
    with pytest.raises(UsageError, match=r"5 workers .* only 4 cores beside the 12 of --cores-reserved .* at most 4"):
        shares(tree("two sockets"), 5, cores_reserved=6)


# kinds of cores


def test_each_rank_has_the_same_mix_of_kinds() -> None:
    found = shares(tree("hybrid"), 2)
    kinds = {cpu.id: cpu.kind for cpu in tree("hybrid").cpus}
    for share in cores(found):
        assert Counter(kinds[cpu] for cpu in share) == {"performance": 4, "efficiency": 4}
    assert found.notes == ("cores differ in kind: each worker has 4 performance and 4 efficiency",)


def test_kinds_that_cannot_be_divided_evenly() -> None:
    found = shares(tree("hybrid"), 3)
    kinds = {cpu.id: cpu.kind for cpu in tree("hybrid").cpus}
    mixes = [Counter(kinds[cpu] for cpu in share) for share in cores(found)]
    assert all(mix["performance"] >= 2 and mix["efficiency"] >= 2 and mix.total() == 5 for mix in mixes)
    assert "worker 0 has" in found.notes[0]
    assert shares(tree("two sockets"), 2).notes == ()


# devices


def test_eight_gpus() -> None:
    machine = tree("eight gpus")
    found = shares(machine, 8, (0, 0, 1, 1, 2, 2, 3, 3))
    assert cores(found) == [tuple(range(first, first + 4)) for first in range(0, 32, 4)]
    assert [share.memory_nodes for share in found.ranks] == [(n // 2,) for n in range(8)]
    # The order of the devices is what counts, not that of the nodes.
    assert cores(shares(machine, 2, (3, 0, 1))) == [tuple(range(24, 32)), tuple(range(8))]


def test_reserved_cores_with_devices() -> None:
    assert cores(shares(tree("eight gpus"), 2, (1, 1), cores_reserved=2)) == [(8, 9, 10), (11, 12, 13)]


@pytest.mark.parametrize(
    ("ranks", "devices", "why"),
    [
        (2, (0, None), "device 1: the kernel does not say at which NUMA node it is"),
        (2, (None, None), "device 0: the kernel does not say"),
        (4, (0, 1), "there are 2 devices for 4 workers"),
        (9, (0,) * 9, "node 0 has 8 cores for the 9 devices there"),
        (1, (9,), "device 0: there is no core to use at its node 9"),
    ],
)
def test_without_knowing_the_node_of_a_device(ranks: int, devices: tuple[int | None, ...], why: str) -> None:
    machine = tree("two sockets")
    found = shares(machine, ranks, devices)
    assert cores(found) == cores(shares(machine, ranks))
    assert why in found.warnings[0]
    assert "workers are spread over the NUMA nodes" in found.warnings[0]


def test_one_node_needs_no_devices() -> None:
    assert shares(tree("one socket"), 2, (None, None)).warnings == ()


def test_a_device_at_a_node_without_cores_goes_to_the_nearest() -> None:
    machine = tree("memory of a GPU")
    assert [node.id for node in machine.nodes] == [0, 8, 254]
    assert cores(shares(machine, 2, (254, 0))) == [(4, 5, 6, 7), (0, 1, 2, 3)]


def test_a_node_cut_into_several_counts_once() -> None:
    machine = tree("fake numa, two sockets")
    assert cores(shares(machine, 3, (0, 1, 3))) == [(0, 1), (2, 3), (4, 5, 6, 7)]


def test_a_core_list_wins_over_devices() -> None:
    found = shares(tree("eight gpus"), 2, (3, 3), core_list=(0, 1, 2, 3))
    assert cores(found) == [(0, 1), (2, 3)]
    assert found.warnings == ()


# memory


@pytest.mark.parametrize("name", ["xeon max, flat", "xeon max, flat, snc4", "xeon max, flat, by tiers"])
def test_flat_hbm_is_preferred(name: str) -> None:
    machine = tree(name)
    with_cores = list(machine.nodes_with_cores())
    found = shares(machine, len(with_cores))
    for node, share in zip(with_cores, found.ranks, strict=True):
        assert (share.memory_policy, share.memory_nodes) == ("preferred", (node + len(with_cores),))
    assert memory_policy(machine, tuple(machine.allowed_cpus)) == ("default", ())


def test_hbm_that_may_not_be_used() -> None:
    machine = tree("xeon max, flat")
    without = Machine(machine.cpus, machine.nodes, machine.allowed_cpus, (0, 1))
    assert memory_policy(without, (0, 1)) == ("bind", (0,))


def test_two_hbm_nodes_at_the_same_distance() -> None:
    spec = Spec(cores=2, memory=MACHINES["xeon max, flat"].memory[:1] * 2, model=MACHINES["xeon max, flat"].model)
    machine = made(spec)
    assert memory_policy(machine, (0, 1)) == ("preferred", (1, 2))


@pytest.mark.parametrize("name", ["cxl", "persistent memory", "memory of unknown kind", "xeon max, cache"])
def test_slower_memory_is_not_chosen(name: str) -> None:
    found = shares(tree(name), 2)
    assert [(share.memory_policy, share.memory_nodes) for share in found.ranks] == [("bind", (0,)), ("bind", (1,))]


def test_fake_numa_binds_to_the_whole_set() -> None:
    assert memory_policy(tree("fake numa"), (0,)) == ("bind", (0, 1, 2, 3))
    assert memory_policy(tree("fake numa, two sockets"), (4, 5)) == ("bind", (2, 3))


def test_policies_that_were_asked_for() -> None:
    two = tree("two sockets")
    assert memory_policy(two, (0, 1), "bind") == ("bind", (0,))
    assert memory_policy(two, (0, 8), "bind") == ("bind", (0, 1))
    assert memory_policy(two, (0, 8), "preferred") == ("preferred", (0, 1))
    assert memory_policy(two, (0,), "interleave") == ("interleave", (0, 1))
    assert memory_policy(two, (0,), "none") == ("default", ())
    assert memory_policy(tree("xeon max, flat"), (0,), "bind") == ("bind", (0,))
    assert memory_policy(tree("cxl"), (0,), "interleave") == ("interleave", (0, 1))
    assert memory_policy(tree("a node without memory"), (4,), "bind") == ("bind", (0,))
    assert memory_policy(tree("a node without memory"), (4,)) == ("default", ())


def test_a_policy_that_cannot_be_had_is_a_warning() -> None:
    found = shares(tree("vm without nodes"), 2, memory_policy="bind")
    assert found.warnings == ("--mem-policy bind is left out: this kernel has no NUMA nodes",)
    machine = Machine((Cpu(0), Cpu(1, node=1)), (NumaNode(0, (0,), 1), NumaNode(1, (1,), 1)), (0, 1), (1,))
    assert "may use no memory there" in shares(machine, 2, memory_policy="bind").warnings[0]
    assert shares(tree("vm without nodes"), 2).warnings == ()


def test_interleaving_needs_no_binding() -> None:
    found = bind_ranks(BindingOptions(memory_policy="interleave"), tree("two sockets"), 2)
    assert [(share.cores, share.memory_nodes) for share in found.ranks] == [((), (0, 1))] * 2
