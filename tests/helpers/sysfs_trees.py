# SPDX-License-Identifier: Apache-2.0
"""Writes sys/ and proc/ of made-up machines, as Linux would show them; `read_machine(root)` reads them back.

    expected = build(MACHINES["snc4"], tmp_path)
    machine = read_machine(tmp_path)

`MACHINES` has one of each kind that the reader and the planner have to manage. What a real kernel shows was taken
from its documentation (Documentation/ABI/stable/sysfs-devices-node, numaperf.rst) and from recordings of hwloc's tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from anyaccel.topology import format_cpu_list

XEON_MAX = "Intel(R) Xeon(R) CPU Max 9480"
H100 = ("0x030200", "0x10de", "0x2330")
BMC = ("0x030000", "0x1a03", "0x2000")


@dataclass(frozen=True)
class Memory:
    """A node that has memory and no cores.

    Attributes:
        gib: its size.
        near: the nodes with cores that are closest, counted from 0 before `node_ids` renames them.
        told_by: how the kernel tells its kind: "fast" or "slow" (bandwidth of the firmware's table), "tier" (a
            faster one), "nvdimm" or "cxl" (where its DAX device is), "nvidia" (the driver); "" for not at all.
        distance: from the nearest nodes.
    """

    gib: float
    near: tuple[int, ...]
    told_by: str = ""
    distance: int = 14


@dataclass(frozen=True)
class Spec:
    """A machine. CPUs and nodes are counted from 0 and then renamed by `cpu_ids` and `node_ids`.

    Attributes:
        packages, nodes, cores, threads: nodes of a package, cores of a node, threads of a core; nodes=0 is a kernel
            without a node directory.
        numbering: "cores first" (x86: all first threads, then all second ones), "side by side" (POWER, and E-cores)
            or "alternating" (cores first, packages in turn).
        efficiency: so many of the cores of each node are efficiency cores with one thread.
        cpu_ids, node_ids: what the kernel calls them; as counted when empty. `node_ids` has those of `memory` last.
        fake: nodes that each node is cut into (numa=fake=N).
        gib: memory of each node with cores, except those in `without_memory`.
        memory: nodes without cores.
        memory_cache_gib: HBM in cache mode, of each node.
        l3: "package", "node" or the number of cores that share one.
        caches: whether the kernel shows caches at all.
        hidden: nodes with cores, counted from 0, that the kernel does not show, though their CPUs may be online.
        offline: CPUs that are switched off, by their final number.
        allowed, mems: lists of /proc/self/status; all when None.
        cgroup: "v1" or "v2" puts `allowed` and `mems` into a cpuset instead.
        devices: PCI address, (class, vendor, device), node by its final number (-1: not known).
    """

    packages: int = 1
    nodes: int = 1
    cores: int = 4
    threads: int = 1
    numbering: str = "cores first"
    efficiency: int = 0
    cpu_ids: tuple[int, ...] = ()
    node_ids: tuple[int, ...] = ()
    fake: int = 1
    gib: float = 64.0
    without_memory: tuple[int, ...] = ()
    memory: tuple[Memory, ...] = ()
    memory_cache_gib: float = 0.0
    l3: str | int = "package"
    caches: bool = True
    hidden: tuple[int, ...] = ()
    offline: tuple[int, ...] = ()
    allowed: str | None = None
    mems: str | None = None
    cgroup: str = ""
    devices: tuple[tuple[str, tuple[str, str, str], int], ...] = ()
    model: str = "Made-up CPU"
    arm64: bool = False


@dataclass(frozen=True)
class Core:
    """A core as the tree has it."""

    package: int
    node: int
    number: int
    cpus: tuple[int, ...]
    efficient: bool = False


@dataclass(frozen=True)
class Expected:
    """What a right reader finds, by the final numbers.

    Attributes:
        cores: online logical CPUs of each core that has some.
        node_of, package_of: by online CPU; with fake NUMA the lowest of the nodes.
        nodes: all nodes, 0 where there is no node directory.
    """

    cores: frozenset[tuple[int, ...]]
    node_of: dict[int, int]
    package_of: dict[int, int]
    nodes: tuple[int, ...]
    efficient: frozenset[int] = field(default_factory=frozenset)

    @property
    def online(self) -> tuple[int, ...]:
        return tuple(sorted(self.node_of))


def build(spec: Spec, root: Path) -> Expected:
    """Write the tree of a machine below `root`."""
    return _Writer(spec, root).build()


class _Writer:
    def __init__(self, spec: Spec, root: Path) -> None:
        self.spec = spec
        self.root = root
        self.cores = _cores(spec)
        self.offline = set(spec.offline)
        self.online = sorted({cpu for core in self.cores for cpu in core.cpus} - self.offline)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def build(self) -> Expected:
        spec = self.spec
        everything = sorted([*self.online, *self.offline])
        self.write("sys/devices/system/cpu/online", format_cpu_list(self.online))
        self.write("sys/devices/system/cpu/present", format_cpu_list(everything))
        self.write("sys/devices/system/cpu/possible", f"0-{max(everything) + 8}")
        for core in self.cores:
            for cpu in core.cpus:
                self._cpu(core, cpu)
        if not spec.arm64:
            self.write("proc/cpuinfo", f"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: {spec.model}")
        self._kinds()
        if spec.caches:
            self._caches()
        node_ids = self._nodes() if spec.nodes else (0,)
        self._limits()
        for address, (code, vendor, device), node in spec.devices:
            folder = f"sys/bus/pci/devices/{address}"
            for name, value in {"class": code, "vendor": vendor, "device": device, "numa_node": node}.items():
                self.write(f"{folder}/{name}", value)
        self.write("sys/bus/pci/devices/0000:00:1f.0/class", "0x060100")  # a bridge, as every machine has
        self.write("proc/meminfo", f"MemTotal: {self._kib(self._total_gib())} kB\nMemFree: 1 kB")

        def node_of(core: Core) -> int:
            """The lowest of the nodes that show it."""
            return min(node_ids[core.node * spec.fake :][: spec.fake], default=0) if spec.nodes else 0

        alive = [(core, tuple(cpu for cpu in core.cpus if cpu not in self.offline)) for core in self.cores]
        return Expected(
            frozenset(cpus for _, cpus in alive if cpus),
            {cpu: node_of(core) for core, cpus in alive for cpu in cpus},
            {cpu: core.package for core, cpus in alive for cpu in cpus},
            tuple(sorted(self._seen(node_ids))),
            frozenset(cpu for core, cpus in alive for cpu in cpus if core.efficient),
        )

    def _seen(self, node_ids: tuple[int, ...]) -> list[int]:
        """The nodes that a reader can know of: those that are shown, or that have online CPUs."""
        used = {core.node for core in self.cores if set(core.cpus) - self.offline}
        return [node for index, node in enumerate(node_ids) if index not in self.spec.hidden or index in used]

    @staticmethod
    def _kib(gib: float) -> int:
        return int(gib * 2**20)

    def _total_gib(self) -> float:
        with_memory = self.spec.packages * max(1, self.spec.nodes) - len(self.spec.without_memory)
        return with_memory * self.spec.gib + sum(memory.gib for memory in self.spec.memory)

    def _cpu(self, core: Core, cpu: int) -> None:
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        if cpu:
            self.write(f"{folder}/online", int(cpu not in self.offline))
        if cpu in self.offline:
            return  # the kernel removes topology/ and cache/
        siblings = format_cpu_list(sorted(set(core.cpus) - self.offline))
        per_package = max(1, self.spec.nodes) * self.spec.cores
        self.write(f"{folder}/topology/physical_package_id", core.package)
        self.write(f"{folder}/topology/die_id", 0)
        self.write(f"{folder}/topology/core_id", core.number % per_package)
        self.write(f"{folder}/topology/thread_siblings_list", siblings)
        self.write(f"{folder}/topology/core_cpus_list", siblings)
        if self.spec.arm64:
            self.write(f"{folder}/cpu_capacity", 446 if core.efficient else 1024)

    def _kinds(self) -> None:
        if self.spec.arm64:
            self.write("sys/devices/armv8_pmuv3_0/cpus", format_cpu_list(self.online))
        elif self.spec.efficiency:
            for name, wanted in {"cpu_core": False, "cpu_atom": True}.items():
                cpus = sorted(cpu for core in self.cores if core.efficient is wanted for cpu in core.cpus)
                self.write(f"sys/devices/{name}/cpus", format_cpu_list(set(cpus) - self.offline))
        else:
            self.write("sys/devices/cpu/type", 4)

    def _caches(self) -> None:
        size = self.spec.l3 if isinstance(self.spec.l3, int) else 0
        l3: dict[object, list[Core]] = {}
        l2: dict[object, list[Core]] = {}
        for core in self.cores:
            group = core.number // size if size else core.node if self.spec.l3 == "node" else core.package
            l3.setdefault(group, []).append(core)
            l2.setdefault((core.node, "cluster", core.number // 4) if core.efficient else core.number, []).append(core)
        for core in self.cores:
            key = (core.node, "cluster", core.number // 4) if core.efficient else core.number
            group = core.number // size if size else core.node if self.spec.l3 == "node" else core.package
            rows = [
                (1, "Data", "32K" if core.efficient else "48K", [core]),
                (1, "Instruction", "32K", [core]),
                (2, "Unified", "4096K" if core.efficient else "2048K", l2[key]),
                (3, "Unified", "32768K" if size else "107520K", l3[group]),
            ]
            for cpu in set(core.cpus) - self.offline:
                for index, (level, kind, amount, sharers) in enumerate(rows):
                    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
                    shared = sorted({other for sharer in sharers for other in sharer.cpus} - self.offline)
                    self.write(f"{folder}/level", level)
                    self.write(f"{folder}/type", kind)
                    self.write(f"{folder}/size", amount)
                    self.write(f"{folder}/shared_cpu_list", format_cpu_list(shared))

    def _nodes(self) -> tuple[int, ...]:
        spec = self.spec
        assert not (spec.hidden and (spec.fake > 1 or spec.nodes > 1)), "hide whole packages"
        with_cores = spec.packages * spec.nodes
        count = with_cores * spec.fake + len(spec.memory)
        ids = spec.node_ids or tuple(range(count))
        assert len(ids) == count, "node_ids must name every node"
        for index, node in enumerate(ids):
            folder = f"sys/devices/system/node/node{node}"
            if index in spec.hidden:
                continue
            if index < with_cores * spec.fake:
                physical = index // spec.fake
                cpus = [cpu for core in self.cores if core.node == physical for cpu in core.cpus]
                gib = 0.0 if physical in spec.without_memory else spec.gib / spec.fake
            else:
                memory = spec.memory[index - with_cores * spec.fake]
                cpus, gib = [], memory.gib
                self._tell(memory, node, ids)
            self.write(f"{folder}/cpulist", format_cpu_list(sorted(set(cpus) - self.offline)))
            for cpu in self.offline.intersection(cpus):
                self.write(f"{folder}/cpu{cpu}/online", 0)  # the kernel links CPUs that are off-line, too
            self.write(f"{folder}/meminfo", f"Node {node} MemTotal: {self._kib(gib)} kB\nNode {node} MemFree: 1 kB")
            columns = sorted(range(count), key=lambda other: ids[other])
            row = " ".join(str(self._distance(index, other)) for other in columns)
            self.write(f"{folder}/distance", row)
            if spec.memory_cache_gib:
                self.write(f"{folder}/memory_side_cache/index1/size", int(spec.memory_cache_gib * 2**30))
        shown = [node for index, node in enumerate(ids) if index not in spec.hidden]
        self.write("sys/devices/system/node/online", format_cpu_list(sorted(shown)))
        self.write("sys/devices/system/node/possible", format_cpu_list(sorted(ids)))
        physical = {node: index // spec.fake for index, node in enumerate(ids)}
        with_memory = [node for node in ids if physical[node] not in spec.without_memory]
        self.write("sys/devices/system/node/has_memory", format_cpu_list(sorted(with_memory)))
        if any(memory.told_by in ("fast", "slow") for memory in spec.memory):
            for node in ids[: with_cores * spec.fake]:
                self.write(f"sys/devices/system/node/node{node}/access1/initiators/read_bandwidth", 262144)
        self._tiers(ids, with_cores * spec.fake)
        return ids

    def _tell(self, memory: Memory, node: int, ids: tuple[int, ...]) -> None:
        access = f"sys/devices/system/node/node{node}/access1/initiators"
        dax = f"sys/bus/dax/devices/dax{node}.0"
        places = {
            "nvdimm": "sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0012:00/ndbus0/region0/dax0.1",
            "cxl": "sys/devices/platform/ACPI0017:00/root0/decoder0.0/region0/dax_region0",
        }
        if memory.told_by in ("fast", "slow"):
            self.write(f"{access}/read_bandwidth", 838860 if memory.told_by == "fast" else 65536)
            for near in memory.near:
                (self.root / access / f"node{ids[near]}").mkdir()
        elif memory.told_by in places:
            place = f"{places[memory.told_by]}/dax{node}.0"
            self.write(f"{place}/target_node", node)
            link = self.root / dax
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"../../../../{place}")
        elif memory.told_by == "nvidia":
            status = f"Node: {node}\nStatus: online"
            self.write(f"proc/driver/nvidia/gpus/0000:{node:02x}:00.0/numa_status", status)

    def _tiers(self, ids: tuple[int, ...], with_cores: int) -> None:
        fast = [ids[with_cores + n] for n, memory in enumerate(self.spec.memory) if memory.told_by == "tier"]
        usual = [node for node in ids if node not in fast]
        for tier, nodes in {3: fast, 4: usual}.items():
            if fast:
                folder = f"sys/devices/virtual/memory_tiering/memory_tier{tier}"
                self.write(f"{folder}/nodelist", format_cpu_list(sorted(nodes)))

    def _distance(self, one: int, other: int) -> int:
        spec = self.spec
        with_cores = spec.packages * spec.nodes * spec.fake
        if one == other:
            return 10
        for memory_only, node in ((one, other), (other, one)):
            if memory_only >= with_cores:
                memory = spec.memory[memory_only - with_cores]
                return memory.distance if node in memory.near else memory.distance + 10
        if one // spec.fake == other // spec.fake:
            return 10
        return 12 if one // spec.fake // spec.nodes == other // spec.fake // spec.nodes else 21

    def _limits(self) -> None:
        spec = self.spec
        limits = {"Cpus_allowed_list": spec.allowed, "Mems_allowed_list": spec.mems}
        if spec.cgroup:
            limits = dict.fromkeys(limits)
            files = {"cpus": spec.allowed, "mems": spec.mems}
            v1 = spec.cgroup == "v1"
            self.write("proc/self/cgroup", "7:cpuset:/box/job\n0::/" if v1 else "0::/box/job")
            for name, text in files.items():
                file = f"cpuset/box/job/cpuset.effective_{name}" if v1 else f"box/cpuset.{name}.effective"
                if text is not None:
                    self.write(f"sys/fs/cgroup/{file}", text)
        lines = [f"{name}:\t{text}" for name, text in limits.items() if text is not None]
        self.write("proc/self/status", "\n".join(["Name:\tpython", *lines]))


def _cores(spec: Spec) -> list[Core]:
    places = [
        (package, package * max(1, spec.nodes) + node, core)
        for package in range(spec.packages)
        for node in range(max(1, spec.nodes))
        for core in range(spec.cores)
    ]
    sizes = [1 if core >= spec.cores - spec.efficiency else spec.threads for _, _, core in places]
    order = list(range(len(places)))
    if spec.numbering == "alternating":
        per_package = len(places) // spec.packages
        order.sort(key=lambda index: (index % per_package, index // per_package))
    slots = [(index, thread) for thread in range(spec.threads) for index in order if thread < sizes[index]]
    if spec.numbering == "side by side":
        slots.sort()
    ids = spec.cpu_ids or tuple(range(len(slots)))
    assert len(ids) == len(slots), "cpu_ids must name every CPU"
    cpus: dict[int, list[int]] = {}
    for (index, _), cpu in zip(slots, ids, strict=True):
        cpus.setdefault(index, []).append(cpu)
    return [
        Core(package, node, number, tuple(sorted(cpus[number])), core >= spec.cores - spec.efficiency)
        for number, (package, node, core) in enumerate(places)
    ]


_TWO_SOCKETS = Spec(packages=2, cores=8, threads=2, mems="0-1")

MACHINES: dict[str, Spec] = {
    "one socket": Spec(),
    "two sockets": _TWO_SOCKETS,
    "two sockets of 56 cores": Spec(packages=2, cores=56, threads=2, gib=256),
    "four sockets": Spec(packages=4, cores=4, threads=2),
    "eight sockets": Spec(packages=8, cores=4, threads=2),
    "snc2": Spec(packages=2, nodes=2, cores=4, threads=2),
    "snc4": Spec(packages=2, nodes=4, cores=3, threads=2),
    "nps4": Spec(packages=2, nodes=4, cores=8, threads=2, l3=8, model="AMD EPYC 7763 64-Core Processor"),
    "xeon max, flat": Spec(
        packages=2, cores=8, threads=2, model=XEON_MAX, memory=(Memory(64, (0,), distance=13), Memory(64, (1,), "", 13))
    ),
    "xeon max, flat, snc4": Spec(
        packages=2,
        nodes=4,
        cores=3,
        threads=2,
        gib=32,
        model=XEON_MAX,
        memory=tuple(Memory(16, (node,), "fast", 13) for node in range(8)),
    ),
    "xeon max, flat, by tiers": Spec(packages=2, memory=(Memory(64, (0,), "tier", 13), Memory(64, (1,), "tier", 13))),
    "xeon max, cache": Spec(packages=2, cores=8, threads=2, model=XEON_MAX, memory_cache_gib=64),
    "fake numa": Spec(cores=8, fake=4),
    "fake numa, two sockets": Spec(packages=2, cores=4, threads=2, fake=2),
    "cxl": Spec(packages=2, memory=(Memory(128, (0, 1), "cxl", 20),)),
    "cxl without driver": Spec(packages=2, memory=(Memory(128, (0,), "slow", 20),)),
    "persistent memory": Spec(packages=2, memory=(Memory(512, (0,), "nvdimm", 17), Memory(512, (1,), "nvdimm", 17))),
    "memory of unknown kind": Spec(packages=2, memory=(Memory(96, (0, 1), "", 80),)),
    "memory of a GPU": Spec(
        packages=2, node_ids=(0, 8, 254), numbering="side by side", memory=(Memory(16, (1,), "nvidia", 80),)
    ),
    "sparse": Spec(
        packages=2, cores=3, threads=2, cpu_ids=(4, 9, 17, 2, 40, 33, 5, 10, 64, 3, 41, 99), node_ids=(1, 8)
    ),
    "interleaved": Spec(packages=2, cores=8, threads=2, numbering="alternating"),
    "off-line cores": Spec(packages=2, cores=4, threads=2, offline=(1, 5, 9, 10, 15)),
    "off-line cpu 0": Spec(cores=4, threads=2, offline=(0, 4)),
    # As a PowerEdge R630 was recorded for hwloc's tests with node 0 off-line, and CPU 0 and others beside it.
    "off-line node 0": Spec(
        packages=2, cores=12, numbering="alternating", hidden=(0,), offline=(0, 1, 2, 3, 21, 22, 23)
    ),
    "a node without online cores": Spec(packages=2, cores=2, offline=(2, 3)),
    "smt1": Spec(cores=6),
    "smt2": Spec(cores=6, threads=2),
    "smt4": Spec(packages=2, cores=4, threads=4, numbering="side by side"),
    "smt8": Spec(packages=2, cores=3, threads=8, numbering="side by side", node_ids=(0, 8), model="POWER9"),
    "cpuset": Spec(packages=2, cores=4, threads=2, allowed="1,5-7,13", mems="1"),
    "cpuset v1": Spec(packages=2, cores=4, threads=2, allowed="1,5-7,13", mems="1", cgroup="v1"),
    "cpuset v2": Spec(packages=2, cores=4, threads=2, allowed="1,5-7,13", mems="1", cgroup="v2"),
    "arm64": Spec(packages=2, nodes=2, cores=8, arm64=True, l3="node"),
    "arm64, hybrid": Spec(cores=8, efficiency=4, arm64=True),
    # NVIDIA Grace, two of them or one beside a Hopper, whose memory is a node far away.
    "grace": Spec(packages=2, cores=72, arm64=True, caches=False, gib=240),
    "grace hopper": Spec(cores=72, arm64=True, caches=False, gib=480, memory=(Memory(96, (0,), "nvidia", 80),)),
    "graviton": Spec(cores=64, arm64=True, caches=False, gib=128),
    # Ampere Altra, two sockets in quadrants.
    "altra": Spec(packages=2, nodes=4, cores=20, arm64=True, caches=False),
    # As device trees number them: little cores first, and no nodes.
    "big.LITTLE": Spec(nodes=0, cores=8, efficiency=4, arm64=True, cpu_ids=(4, 5, 6, 7, 0, 1, 2, 3), gib=8),
    "hybrid": Spec(cores=16, threads=2, efficiency=8, numbering="side by side", model="13th Gen Intel(R) Core(TM)"),
    "vm without nodes": Spec(nodes=0, cores=2, threads=2, gib=8),
    "a node without memory": Spec(packages=2, without_memory=(1,)),
    "eight gpus": Spec(
        packages=2,
        nodes=2,
        cores=8,
        threads=2,
        devices=(
            *((f"0000:{17 + 16 * number:02x}:00.0", H100, number // 2) for number in range(8)),
            ("0000:02:00.0", BMC, -1),
        ),
    ),
}
