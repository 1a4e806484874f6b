# SPDX-License-Identifier: Apache-2.0
"""Reading recorded machines of many shapes, and this one."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from anyaccel.topology import format_cpu_list, read_machine


class Tree:
    """Writes the files below /sys and /proc that the kernel would show."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def cpu(self, number, *, package=0, die=0, core=None, siblings=None, online=True):
        folder = f"sys/devices/system/cpu/cpu{number}"
        if not online:
            self.write(f"{folder}/online", 0)  # the kernel removes topology/ of an offline CPU
            return
        if number:
            self.write(f"{folder}/online", 1)
        self.write(f"{folder}/topology/physical_package_id", package)
        self.write(f"{folder}/topology/die_id", die)
        self.write(f"{folder}/topology/core_id", number if core is None else core)
        self.write(f"{folder}/topology/thread_siblings_list", format_cpu_list(siblings or [number]))

    def online(self, cpus):
        self.write("sys/devices/system/cpu/online", cpus)

    def node(self, number, cpus, gib=4.0, distance="10"):
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(
            f"{folder}/meminfo",
            f"Node {number} MemTotal:  {int(gib * 2**20)} kB\nNode {number} MemFree: 1 kB",
        )
        self.write(f"{folder}/distance", distance)

    def status(self, cpus=None, mems=None):
        lines = ["Name:\tpython"]
        lines += [] if cpus is None else [f"Cpus_allowed:\tff\nCpus_allowed_list:\t{cpus}"]
        lines += [] if mems is None else [f"Mems_allowed_list:\t{mems}"]
        self.write("proc/self/status", "\n".join(lines))

    def machine(self):
        return read_machine(self.root)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def ids(cpus):
    return [cpu.id for cpu in cpus]


def by_node(machine):
    return {node: ids(cores) for node, cores in machine.nodes_with_cores().items()}


def test_two_sockets(tree):
    for i in range(8):
        tree.cpu(i, package=i // 4, core=i % 4)  # core ids repeat in each package
    tree.online("0-7")
    tree.node(0, "0-3", distance="10 21")
    tree.node(1, "4-7", distance="21 10")
    tree.status("0-7", "0-1")
    machine = tree.machine()
    assert by_node(machine) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    assert machine.nodes[1].distances == {0: 21, 1: 10}
    assert machine.nodes[0].memory_bytes == 4 << 30
    assert machine.allowed_memory_nodes == (0, 1)
    assert machine.cpu(5).package == 1
    assert machine.cpu(5).core == 5


def test_snc4_on_two_sockets(tree):
    for i in range(16):
        tree.cpu(i, package=i // 8)
    tree.online("0-15")
    for node in range(8):
        tree.node(node, f"{2 * node}-{2 * node + 1}", distance=" ".join(["10"] * 8))
    machine = tree.machine()
    assert len(by_node(machine)) == 8
    assert by_node(machine)[5] == [10, 11]
    assert machine.summary().startswith("2 packages, 8 NUMA nodes (32.0 GiB in all), 16 cores")


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_smt_with_adjacent_numbers(tree, threads):
    for i in range(2 * threads):
        first = i // threads * threads
        tree.cpu(i, core=first, siblings=range(first, first + threads))
    tree.online(f"0-{2 * threads - 1}")
    tree.node(0, f"0-{2 * threads - 1}")
    machine = tree.machine()
    assert ids(machine.cores()) == [0, threads]
    assert f"2 cores, {threads} threads each" in machine.summary()


def test_smt_with_interleaved_numbers(tree):
    # The usual x86 numbering: the second threads come after all first ones; nodes alternate.
    for i in range(8):
        tree.cpu(i, package=i % 2, core=i % 4 // 2, siblings=[i % 4, i % 4 + 4])
    tree.online("0-7")
    tree.node(0, "0,2,4,6")
    tree.node(1, "1,3,5,7")
    assert by_node(tree.machine()) == {0: [0, 2], 1: [1, 3]}


def test_core_cpus_list_is_enough(tree):
    for i in range(2):
        tree.cpu(i)
        folder = tree.root / f"sys/devices/system/cpu/cpu{i}/topology"
        (folder / "thread_siblings_list").rename(folder / "core_cpus_list")
        (folder / "core_cpus_list").write_text("0-1\n")
    tree.online("0-1")
    assert ids(tree.machine().cores()) == [0]


def test_siblings_from_core_ids_when_no_list_is_shown(tree):
    for i in range(4):
        tree.cpu(i, package=i // 2, core=0)
        (tree.root / f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list").unlink()
    tree.online("0-3")
    assert ids(tree.machine().cores()) == [0, 2]


def test_offline_and_sparse_cpus(tree):
    for i in (0, 2, 3, 7):
        # The kernel's list still names an offline sibling on some versions.
        tree.cpu(i, online=i != 3, siblings=[2, 3] if i == 2 else None)
    tree.online("0,2,7")
    tree.node(0, "0,2-3,7")
    machine = tree.machine()
    assert ids(machine.cpus) == [0, 2, 7]
    assert machine.nodes[0].cpus == (0, 2, 7)
    assert machine.cpu(2).siblings == (2,)


def test_offline_cpus_without_the_online_list(tree):
    for i in range(4):
        tree.cpu(i, online=i != 1)
    assert ids(tree.machine().cpus) == [0, 2, 3]


def test_sparse_nodes_and_offline_node(tree):
    tree.cpu(0)
    tree.cpu(1)
    tree.online("0-1")
    tree.node(1, "0", distance="10 20")
    tree.node(8, "1", distance="20 10")
    tree.node(9, "")
    tree.write("sys/devices/system/node/online", "1,8")
    machine = tree.machine()
    assert by_node(machine) == {1: [0], 8: [1]}
    assert machine.nodes[1].distances == {1: 20, 8: 10}


def test_memory_only_node_and_node_without_memory(tree):
    tree.cpu(0)
    tree.cpu(1)
    tree.online("0-1")
    tree.node(0, "0")
    tree.node(1, "1", gib=0)
    tree.node(2, "", gib=16)
    machine = tree.machine()
    assert by_node(machine) == {0: [0], 1: [1]}
    assert machine.allowed_memory_nodes == (0, 2)
    assert "no memory" in machine.summary()


def test_no_node_directory(tree):
    tree.cpu(0)
    tree.cpu(1)
    tree.online("0-1")
    tree.write("proc/meminfo", "MemTotal:       2097152 kB\nMemFree: 1 kB")
    machine = tree.machine()
    assert by_node(machine) == {0: [0, 1]}
    assert machine.nodes[0].memory_bytes == 2 << 30
    assert machine.allowed_memory_nodes == ()  # the kernel has no set_mempolicy either


@pytest.mark.parametrize(("node", "host", "shown"), [(6.5, 23.5, 23.5), (8, 7.75, 8)])
def test_memory_of_the_only_node_is_that_of_the_machine(tree, node, host, shown):
    # A virtual machine to which memory was added while it ran.
    tree.cpu(0)
    tree.online("0")
    tree.node(0, "0", gib=node)
    tree.write("proc/meminfo", f"MemTotal: {int(host * 2**20)} kB")
    assert tree.machine().nodes[0].memory_bytes == shown * 2**30
    tree.node(1, "", gib=1)
    assert tree.machine().nodes[0].memory_bytes == node * 2**30


def test_cpuset(tree):
    for i in range(8):
        tree.cpu(i, siblings=[i % 4, i % 4 + 4])
    tree.online("0-7")
    tree.node(0, "0-1,4-5")
    tree.node(1, "2-3,6-7")
    tree.status("1,5-7,12", "1")
    machine = tree.machine()
    assert machine.allowed_cpus == (1, 5, 6, 7)
    assert ids(machine.cores()) == [1, 6, 7]
    assert machine.allowed_memory_nodes == (1,)


def test_fake_numa_gives_each_core_to_one_node(tree):
    tree.cpu(0)
    tree.cpu(1)
    tree.online("0-1")
    tree.node(0, "0-1")
    tree.node(1, "0-1")
    assert by_node(tree.machine()) == {0: [0, 1]}


def test_missing_and_senseless_topology_files(tree):
    tree.write("sys/devices/system/cpu/cpu0/uevent", "")
    tree.write("sys/devices/system/cpu/cpu1/topology/physical_package_id", "-1")
    tree.write("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "what")
    tree.write("sys/devices/system/node/node0/cpulist", "0-x")
    tree.write("sys/devices/system/node/node0/distance", "10 20 30")
    tree.online("0-1")
    machine = tree.machine()
    assert ids(machine.cores()) == [0, 1]
    assert machine.nodes[0].memory_bytes == 0
    assert machine.nodes[0].distances == {}


def test_empty_tree(tree):
    machine = tree.machine()
    assert ids(machine.cores()) == [0]
    assert len(machine.nodes) == 1


def test_large_machine(tree):
    """Everything that the planner asks of a machine with 512 CPUs is right (and not quadratic)."""
    for i in range(512):
        tree.cpu(i, package=i % 256 // 128, siblings=[i % 256, i % 256 + 256])
    tree.online("0-511")
    for node in range(8):
        tree.node(node, f"{32 * node}-{32 * node + 31},{256 + 32 * node}-{256 + 32 * node + 31}")
    machine = tree.machine()
    assert ids(machine.cores()) == list(range(256))
    assert by_node(machine)[7] == list(range(224, 256))


def test_this_machine():
    machine = read_machine()
    assert set(machine.allowed_cpus) == os.sched_getaffinity(0)
    assert 1 <= len(machine.cores()) <= len(machine.allowed_cpus)
    assert machine.nodes_with_cores()


def test_this_machine_as_lscpu_sees_it():
    if shutil.which("lscpu") is None:
        pytest.skip("lscpu is not installed: apt install util-linux")
    # Of an ordinary machine: without the table that a container may mask, lscpu guesses too.
    done = subprocess.run(["lscpu", "-p=cpu,core,socket,node"], capture_output=True, text=True, check=True, timeout=60)
    rows = [line.split(",") for line in done.stdout.splitlines() if not line.startswith("#")]
    machine = read_machine()

    def groups(column):
        found = {}
        for row in rows:
            found.setdefault(row[column], set()).add(int(row[0]))
        return sorted(map(sorted, found.values()))

    def ours(key):
        found = {}
        for cpu in machine.cpus:
            found.setdefault(key(cpu), set()).add(cpu.id)
        return sorted(map(sorted, found.values()))

    assert [int(row[0]) for row in rows] == ids(machine.cpus)
    assert groups(1) == ours(lambda cpu: cpu.core)
    assert groups(2) == ours(lambda cpu: cpu.package)
    assert groups(3) == ours(lambda cpu: cpu.node)
    if rows[0][3]:
        assert {int(row[0]): int(row[3]) for row in rows} == {cpu.id: cpu.node for cpu in machine.cpus}


def test_a_launch_reads_only_what_a_plan_needs():
    code = (
        "import sys; from anyaccel.topology import read_machine; opened = []; "
        "sys.addaudithook(lambda name, rest: opened.append(str(rest[0])) if name in ('open', 'os.scandir') else None); "
        "read_machine(); print(*opened, sep='\\n')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    wanted = (
        r"/proc/(self/(status|cgroup)|meminfo|mounts)|/.+/cpu\.(max|cfs_(quota|period)_us)|/sys/devices/cpu_(core|atom|lowpower)/cpus|/sys/devices/system/cpu/(online|isolated"
        r"|cpu\d+/(topology/(physical_package_id|die_id|core_id|core_cpus(_list)?|thread_siblings(_list)?)|cpu_capacity))"
        r"|/sys/devices/system/node(/(online|has_memory|node\d+/(cpulist|cpumap|meminfo|distance)))?"
    )
    if any(node.memory_bytes and not node.cpus for node in read_machine().nodes):
        pytest.skip("this machine has memory without cores, whose kind has to be found out")
    opened = out.stdout.split()
    assert "/proc/self/status" in opened
    assert [path for path in opened if not re.fullmatch(wanted, path)] == []


def test_this_machine_restricted_to_one_cpu():
    cpu = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{cpu}]); from anyaccel.topology import read_machine; "
        "m = read_machine(); print(m.allowed_cpus, [c.id for c in m.cores()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == f"({cpu},) [{cpu}]\n"
