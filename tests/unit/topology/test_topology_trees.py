# SPDX-License-Identifier: Apache-2.0
"""Machines of every kind, written as trees and read back; and machines that nobody thought of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from anyaccel.launch.plan.binding import bind_ranks
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.report.topo import memory_name
from anyaccel.topology import Machine, read_machine
from sysfs_trees import MACHINES, Expected, Memory, Spec, build
from workers import memory_folder

pytestmark = pytest.mark.many_files


def read(spec: Spec, root: Path) -> tuple[Machine, Expected]:
    expected = build(spec, root)
    return read_machine(root), expected


def check(machine: Machine, expected: Expected) -> None:
    assert tuple(cpu.id for cpu in machine.cpus) == expected.online
    assert {cpu.siblings for cpu in machine.cpus} == expected.cores
    assert {cpu.id: cpu.node for cpu in machine.cpus} == expected.node_of
    assert {cpu.id: cpu.package for cpu in machine.cpus} == expected.package_of
    assert tuple(node.id for node in machine.nodes) == expected.nodes
    assert {cpu.id for cpu in machine.cpus if cpu.kind == "efficiency"} == expected.efficient
    assert set(machine.allowed_cpus) <= set(expected.online)
    # What the planner builds on: each allowed CPU is in exactly one core, and siblings agree on who they are.
    by_id = {cpu.id: cpu for cpu in machine.cpus}
    for cpu in machine.cpus:
        assert cpu.id in cpu.siblings
        assert all(by_id[other].siblings == cpu.siblings for other in cpu.siblings)
    cores = machine.cores()
    assert {cpu.core for cpu in cores} == {by_id[cpu].core for cpu in machine.allowed_cpus}
    assert len({cpu.core for cpu in cores}) == len(cores)
    assert sorted(cpu.id for group in machine.nodes_with_cores().values() for cpu in group) == [c.id for c in cores]


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    machine, expected = read(MACHINES[name], tmp_path)
    check(machine, expected)
    for node in machine.nodes:
        if node.distances:
            assert set(node.distances) == set(expected.nodes)
            assert node.distances[node.id] == 10


@pytest.mark.parametrize("packages", range(1, 9))
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_one_to_eight_sockets(packages: int, nodes: int, tmp_path: Path) -> None:
    machine, expected = read(Spec(packages=packages, nodes=nodes, cores=2, threads=2, caches=False), tmp_path)
    check(machine, expected)
    assert {cpu.package for cpu in machine.cpus} == set(range(packages))
    assert list(map(len, machine.nodes_with_cores().values())) == [2] * packages * nodes


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    shape = Spec(
        packages=draw(st.integers(1, 3)),
        nodes=draw(st.integers(0, 2)),
        cores=draw(st.integers(1, 3)),
        threads=draw(st.sampled_from([1, 2, 4])),
        numbering=draw(st.sampled_from(["cores first", "side by side", "alternating"])),
        caches=False,
    )
    efficiency = draw(st.integers(0, shape.cores - 1)) if shape.cores > 1 else 0
    shape = replace(shape, efficiency=efficiency, fake=draw(st.integers(1, 2)) if shape.nodes else 1)
    if shape.nodes:
        near = draw(st.integers(0, shape.packages * shape.nodes * shape.fake - 1))
        shape = replace(shape, memory=draw(st.sampled_from([(), (Memory(8, (near,)),)])))
    places = shape.packages * max(1, shape.nodes)
    count = places * ((shape.cores - efficiency) * shape.threads + efficiency)
    cpus = draw(st.permutations(sorted(draw(st.sets(st.integers(0, 200), min_size=count, max_size=count)))))
    nodes = places * shape.fake + len(shape.memory)
    ids = draw(st.permutations(sorted(draw(st.sets(st.integers(0, 60), min_size=nodes, max_size=nodes)))))
    offline = draw(st.sets(st.sampled_from(cpus), max_size=count - 1))
    if shape.nodes == shape.fake == 1 and shape.packages > 1 and draw(st.booleans()):
        shape = replace(shape, hidden=(draw(st.integers(0, shape.packages - 1)),))
    allowed = draw(st.sets(st.sampled_from([cpu for cpu in cpus if cpu not in offline]), min_size=1))
    return replace(
        shape,
        cpu_ids=tuple(cpus),
        node_ids=tuple(ids) if shape.nodes else (),
        offline=tuple(sorted(offline)),
        allowed=",".join(map(str, sorted(allowed | offline))),
        cgroup=draw(st.sampled_from(["", "v1", "v2"])),
    )


@given(specs())
@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink writes trees for minutes
def test_any_numbering_is_read_as_it_was_written(spec: Spec) -> None:
    with memory_folder() as folder:
        machine, expected = read(spec, Path(folder))
    check(machine, expected)
    wanted = {int(cpu) for cpu in (spec.allowed or "").split(",")} & set(expected.online)
    assert set(machine.allowed_cpus) == wanted


def test_cpus_of_a_node_that_is_not_shown_are_not_those_of_another(tmp_path: Path) -> None:
    """Nine CPUs of package 0 are online, and its node is not: ranks do not mix the packages."""
    machine, _ = read(MACHINES["off-line node 0"], tmp_path)
    assert [(node.id, node.cpus, node.memory_bytes) for node in machine.nodes] == [
        (0, tuple(range(4, 21, 2)), 0),  # nobody says what memory is there
        (1, tuple(range(5, 20, 2)), 64 << 30),
    ]
    assert machine.nearest_nodes(1) == (1,)
    assert machine.nodes[0].distances == {0: 10, 1: 21}
    found = bind_ranks(BindingOptions(bind_cores=True), machine, 2)
    shares = [share.cores for share in found.ranks]
    assert shares == [tuple(range(4, 19, 2)), tuple(range(5, 20, 2))]
    assert found.left_over == (20,)
    assert memory_policy(machine, shares[0]) == ("default", ())
    assert memory_policy(machine, shares[0], "bind") == ("bind", (1,))
    assert memory_policy(machine, shares[1]) == ("bind", (1,))


def test_all_cpus_of_the_node_that_is_shown_are_off_line(tmp_path: Path) -> None:
    """What is online belongs to the node that is not shown, not to the one that lists no CPUs."""
    machine, expected = read(Spec(packages=2, cores=2, hidden=(1,), offline=(0, 1)), tmp_path)
    check(machine, expected)
    assert [(node.id, node.cpus, node.memory_bytes) for node in machine.nodes] == [(0, (), 64 << 30), (1, (2, 3), 0)]


def test_memory_of_a_node_that_is_not_shown_is_not_that_of_another(tmp_path: Path) -> None:
    spec = Spec(packages=2, cores=2, hidden=(0,), offline=(0, 1))
    machine, expected = read(spec, tmp_path)
    check(machine, expected)
    assert [(node.id, node.memory_bytes) for node in machine.nodes] == [(1, 64 << 30)]


@pytest.mark.parametrize(
    ("possible", "nodes"),
    [
        ("0-1", {0: (0, 1, 3), 1: (2,)}),  # the kernel knows of a node that it does not show
        ("0", {0: (0, 1, 2, 3)}),  # it shows all: one that was added a moment ago
        (None, {0: (0, 1, 2, 3)}),
    ],
)
def test_a_cpu_that_no_node_lists(possible: str | None, nodes: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    build(Spec(), tmp_path)
    folder = tmp_path / "sys/devices/system/node"
    (folder / "node0/cpulist").write_text("0-1,3\n")
    (folder / "possible").unlink()
    if possible is not None:
        (folder / "possible").write_text(f"{possible}\n")
    machine = read_machine(tmp_path)
    assert {node.id: node.cpus for node in machine.nodes} == nodes
    assert {cpu.id: cpu.node for cpu in machine.cpus} == {cpu: node for node in nodes for cpu in nodes[node]}


def test_nodes_that_list_no_cpus(tmp_path: Path) -> None:
    build(Spec(packages=2, caches=False), tmp_path)
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").unlink()
    machine = read_machine(tmp_path)
    assert {cpu.node for cpu in machine.cpus} == {0}
    assert machine.nodes[0].cpus == tuple(range(8))


@pytest.mark.parametrize("name", ["cpuset", "cpuset v1", "cpuset v2"])
def test_cpusets_limit_cpus_and_memory(name: str, tmp_path: Path) -> None:
    machine, _ = read(MACHINES[name], tmp_path)
    assert machine.allowed_cpus == (1, 5, 6, 7, 13)
    assert [cpu.id for cpu in machine.cores()] == [1, 5, 6, 7]
    assert machine.allowed_memory_nodes == (1,)


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        # The controller is on in a parent only.
        ({"proc/self/cgroup": "0::/a/b/c\n", "sys/fs/cgroup/a/cpuset.cpus.effective": "2-3\n"}, (2, 3)),
        # A container: the path is the host's, what is mounted is the container's own.
        ({"proc/self/cgroup": "4:cpuset:/docker/1f\n", "sys/fs/cgroup/cpuset/cpuset.cpus": "1\n"}, (1,)),
        # Outside of the namespace.
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpuset.cpus.effective": "1\n"}, (0, 1, 2, 3)),
        # An old kernel, and mounted elsewhere.
        ({"proc/self/cpuset": "/job\n", "dev/cpuset/job/cpus": "0,3\n"}, (0, 3)),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "proc/mounts": "none /cgroup/unified cgroup2 rw 0 0\n",
                "cgroup/unified/job/cpuset.cpus.effective": "3\n",
            },
            (3,),
        ),
        # Nothing that this process could run on: not its own.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "64-71\n"}, (0, 1, 2, 3)),
        # The status is narrower.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpuset.cpus.effective": "0-2\n",
                "proc/self/status": "Cpus_allowed_list:\t2-3\n",
            },
            (2,),
        ),
    ],
)
def test_where_cpusets_are_found(files: dict[str, str], allowed: tuple[int, ...], tmp_path: Path) -> None:
    build(Spec(), tmp_path)
    for path, text in files.items():
        put(tmp_path, path, text)
    assert read_machine(tmp_path).allowed_cpus == allowed


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        # The tightest of the groups counts.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "100000 50000\n",
            },
            2,
        ),
        # A container with a namespace of its own.
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/1f\n0::/\n",
                "proc/mounts": "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
    ],
)
def test_how_much_time_the_cgroups_leave(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    build(Spec(), tmp_path)
    for path, text in files.items():
        put(tmp_path, path, text)
    found = read_machine(tmp_path)
    assert found.cpu_quota == quota
    assert ("CPUs' time" in found.summary()) == (quota is not None)


def test_masks_where_lists_are_missing_or_padded(tmp_path: Path) -> None:
    """Old kernels have only masks; `tar` pads what it takes from /sys with NULs."""
    expected = build(replace(MACHINES["interleaved"], allowed=None), tmp_path)
    for cpu in expected.online:
        core = next(core for core in expected.cores if cpu in core)
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        (topology / "core_cpus_list").unlink()
        (topology / "thread_siblings_list").unlink()
        (topology / "thread_siblings").write_text(f"00000000,{sum(1 << other for other in core):08x}\n")
    for node in expected.nodes:
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        (folder / "cpulist").unlink()
        mask = sum(1 << cpu for cpu, of in expected.node_of.items() if of == node)
        (folder / "cpumap").write_text(f"{mask:08x}\n")
    online = tmp_path / "sys/devices/system/cpu/online"
    online.write_bytes(online.read_bytes() + bytes(100))
    check(read_machine(tmp_path), expected)


def test_siblings_that_contradict_each_other_still_make_cores(tmp_path: Path) -> None:
    build(Spec(cores=3), tmp_path)
    for cpu, siblings in {0: "0-1", 1: "1-2", 2: "2,0"}.items():
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", siblings)
    assert {cpu.siblings for cpu in read_machine(tmp_path).cpus} == {(0, 1), (2,)}


# memory without cores


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("xeon max, flat", {2: ("hbm", (0,)), 3: ("hbm", (1,))}),
        ("xeon max, flat, snc4", {8 + node: ("hbm", (node,)) for node in range(8)}),
        ("xeon max, flat, by tiers", {2: ("hbm", (0,)), 3: ("hbm", (1,))}),
        ("cxl", {2: ("cxl", (0, 1))}),
        ("cxl without driver", {2: ("slow", (0,))}),
        ("persistent memory", {2: ("pmem", (0,)), 3: ("pmem", (1,))}),
        ("memory of unknown kind", {2: ("", (0, 1))}),
        ("memory of a GPU", {254: ("gpu", (8,))}),
        ("two sockets", {}),
        ("xeon max, cache", {}),
    ],
)
def test_what_is_known_of_memory_without_cores(
    name: str, kinds: dict[int, tuple[str, tuple[int, ...]]], tmp_path: Path
) -> None:
    machine, _ = read(MACHINES[name], tmp_path)
    found = {node.id: node for node in machine.nodes if not node.cpus}
    assert {id: (node.memory_kind, machine.nearest_nodes(id)) for id, node in found.items()} == kinds
    assert all(bool(node.memory_kind) == bool(node.memory_evidence) for node in found.values())
    assert all(node.memory_kind == "" for node in machine.nodes if node.cpus)


def test_hbm_beside_a_node(tmp_path: Path) -> None:
    machine, _ = read(MACHINES["xeon max, flat, snc4"], tmp_path)
    assert [node.id for node in machine.memory_near(5, "hbm")] == [13]
    assert machine.memory_near(5, "cxl") == ()
    assert [node.id for node in machine.memory_near(5)] == [13]
    assert machine.nearest_nodes(5) == (5,)
    assert machine.nearest_nodes(99) == ()


def test_memory_of_a_xeon_max_that_is_no_hbm(tmp_path: Path) -> None:
    machine, _ = read(replace(MACHINES["xeon max, flat"], memory=(Memory(256, (0,)),)), tmp_path)
    assert machine.nodes[2].memory_kind == ""


def test_memory_of_a_node_whose_cores_are_all_off_line_is_no_hbm(tmp_path: Path) -> None:
    spec = replace(MACHINES["xeon max, flat"], memory=(), offline=(*range(8, 16), *range(24, 32)))
    machine, _ = read(spec, tmp_path)
    assert [(node.memory_kind, node.offline_cpus) for node in machine.nodes] == [("", ()), ("", spec.offline)]
    assert memory_name(machine.nodes[1]) == "memory, all of its CPUs (8-15,24-31) are off-line"


# kinds of cores


@pytest.mark.parametrize("name", ["hybrid", "arm64, hybrid", "big.LITTLE"])
def test_hybrid_cores(name: str, tmp_path: Path) -> None:
    machine, expected = read(MACHINES[name], tmp_path)
    kinds = {cpu.id: cpu.kind for cpu in machine.cpus}
    assert kinds == {cpu: "efficiency" if cpu in expected.efficient else "performance" for cpu in expected.online}
    assert {len(cpu.siblings) for cpu in machine.cpus if cpu.kind == "efficiency"} == {1}


@pytest.mark.parametrize(
    ("name", "ranks", "shares", "memory"),
    [
        ("grace", 2, [range(72), range(72, 144)], [("bind", (0,)), ("bind", (1,))]),
        ("grace hopper", 1, [range(72)], [("bind", (0,))]),  # and not to the memory of the GPU
        ("graviton", 2, [range(32), range(32, 64)], [("bind", (0,))] * 2),
        ("altra", 8, [range(20 * n, 20 * n + 20) for n in range(8)], [("bind", (n,)) for n in range(8)]),
        ("altra", 2, [range(80), range(80, 160)], None),
        ("big.LITTLE", 2, [(0, 1, 4, 5), (2, 3, 6, 7)], None),  # each has as many of either kind
    ],
)
def test_plans_of_arm64_machines(
    name: str,
    ranks: int,
    shares: list[Sequence[int]],
    memory: list[tuple[str, tuple[int, ...]]] | None,
    tmp_path: Path,
) -> None:
    machine, _ = read(MACHINES[name], tmp_path)
    cores = [share.cores for share in bind_ranks(BindingOptions(bind_cores=True), machine, ranks).ranks]
    assert cores == list(map(tuple, shares))
    assert memory is None or [memory_policy(machine, each) for each in cores] == memory


def test_packages_by_the_numbers_of_an_arm64_firmware(tmp_path: Path) -> None:
    """ACPI's table has places in itself for them: 36 and 3180 are two sockets of an Altra."""
    build(MACHINES["two sockets"], tmp_path)
    for cpu in range(32):
        package = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
        package.write_text("36\n" if package.read_text() == "0\n" else "3180\n")
    machine = read_machine(tmp_path)
    assert {cpu.package for cpu in machine.cpus} == {36, 3180}
    shares = [share.cores for share in bind_ranks(BindingOptions(bind_cores=True), machine, 2).ranks]
    assert shares == [tuple(range(8)), tuple(range(8, 16))]


def test_cores_that_only_clock_differently_are_of_one_kind(tmp_path: Path) -> None:
    build(MACHINES["arm64"], tmp_path)
    put(tmp_path, "sys/devices/system/cpu/cpu3/cpu_capacity", "981\n")
    assert {cpu.kind for cpu in read_machine(tmp_path).cpus} == {""}
