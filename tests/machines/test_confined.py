# SPDX-License-Identifier: Apache-2.0
"""Plans within what others have left: taskset, numactl, cgroups of both versions, a container's filter, launchers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from architecture import GUEST
from binding import COMMAND, WHERE, check, on, plan, ranks
from machine import Machine

from cluster_config import SLURM_CONFIG

BIND = ("--bind_cores_to_rank",)
TWO = (*BIND, "--num_accelerators", "2")


@contextmanager
def cgroup(machine: Machine, **limits: str) -> Iterator[Sequence[str]]:
    """What comes before a command to run it in a cgroup with these limits, cpuset_cpus="0-1" and the like."""
    top, own = "/sys/fs/cgroup", "/sys/fs/cgroup/confined"
    machine.check(["sh", "-c", f"mkdir {own} && echo '+cpuset +cpu +memory' > {top}/cgroup.subtree_control"])
    for name, value in limits.items():
        machine.check(["sh", "-c", f"echo '{value}' > {own}/{name.replace('_', '.')}"])
    yield ["sh", "-c", f'echo $$ > {own}/cgroup.procs; exec "$@"', "sh"]
    machine.check(["sh", "-c", f"rmdir {own}"])


@on("four-nodes")
@pytest.mark.parametrize("options", [BIND, TWO, (*BIND, "--mem-policy", "interleave")], ids=" ".join)
def test_cores_that_taskset_left(machine: Machine, options: tuple[str, ...]) -> None:
    planned = check(machine, options, ["taskset", "-c", "1,3-4"])
    assert {core for rank in planned["ranks"] for core in rank["cores"]} <= {1, 3, 4}


@on("four-nodes")
@pytest.mark.parametrize(
    "around",
    [("--cpunodebind=2",), ("--cpunodebind=1,2", "--membind=1,2"), ("--physcpubind=0-5",)],
    ids=" ".join,
)
def test_numactl_around_us(machine: Machine, around: tuple[str, ...]) -> None:
    check(machine, TWO, ["numactl", *around])


@on("four-nodes")
def test_a_policy_of_numactl_stays_where_none_is_asked_for(machine: Machine) -> None:
    for line in ranks(machine, (*TWO, "--mem-policy", "none"), ["numactl", "--interleave=0,3"]):
        assert (line["policy"], line["nodes"]) == ("interleave", [0, 3])


@on("four-nodes")
@pytest.mark.parametrize("options", [BIND, TWO, (*TWO, "--mem-policy", "interleave")], ids=" ".join)
def test_a_cgroup_of_one_node(machine: Machine, options: tuple[str, ...]) -> None:
    with cgroup(machine, cpuset_cpus="2-3", cpuset_mems="1") as around:
        planned = check(machine, options, around)
    assert {core for rank in planned["ranks"] for core in rank["cores"]} == {2, 3}


@on("four-nodes")
def test_a_cgroup_whose_memory_is_on_another_node(machine: Machine) -> None:
    """The cores' own node may not be used: nothing can be bound there."""
    with cgroup(machine, cpuset_cpus="0-3", cpuset_mems="3") as around:
        check(machine, TWO, around)
        for line in ranks(machine, TWO, around):
            assert set(line["pages"]) == {"3"}


@on("four-nodes")
def test_a_quota_below_the_cores(machine: Machine) -> None:
    """A cgroup with two CPUs' worth of time: what is bound still has its cores, and the plan says that it will wait."""
    with cgroup(machine, cpu_max="200000 100000") as around:
        check(machine, TWO, around)
        unbound, _ = plan(machine, ["--num_accelerators", "2"], around)
    assert {rank["env"]["OMP_NUM_THREADS"] for rank in unbound["ranks"]} == {"1"}, unbound


@on("two-nodes")
def test_a_cpuset_of_the_first_version_of_cgroups(machine: Machine) -> None:
    script = "mkdir -p /run/cpuset && mount -t cgroup -o cpuset none /run/cpuset && mkdir /run/cpuset/own"
    machine.check(["sh", "-c", script])
    machine.check(["sh", "-c", "cd /run/cpuset/own && echo 4-6 > cpuset.cpus && echo 1 > cpuset.mems"])
    around = ["sh", "-c", 'echo $$ > /run/cpuset/own/tasks; exec "$@"', "sh"]
    planned = check(machine, TWO, around)
    assert {core for rank in planned["ranks"] for core in rank["cores"]} <= {4, 5, 6}
    machine.check(["sh", "-c", "rmdir /run/cpuset/own && umount /run/cpuset"])


@on("four-nodes")
def test_a_container_that_refuses_memory_policies(machine: Machine) -> None:
    around = [sys.executable, GUEST / "without_policies.py"]
    planned, _ = plan(machine, BIND, around)
    ran = machine.check([*around, COMMAND, "run", *BIND, WHERE])
    lines = {line["env"]["RANK"]: line for line in ran.json_lines()}
    for rank in planned["ranks"]:
        line = lines[str(rank["rank"])]
        assert line["cpus"] == rank["cores"]
        assert line["policy"] == "default"
        assert f"memory of rank {rank['rank']} is not bound to node" in ran.err
    strict = machine.run([*around, COMMAND, "run", *BIND, "--strict", WHERE])
    assert strict.status == 71, strict
    assert not strict.json_lines()


@on("four-nodes")
def test_a_core_that_goes_off_line_while_a_job_runs(machine: Machine) -> None:
    """The job goes on with what it has left, and the next one does not plan with that core."""
    job = machine.start([COMMAND, "run", *TWO, WHERE, "--sleep", "6"])
    machine.check(["sh", "-c", "sleep 3; echo 0 > /sys/devices/system/cpu/cpu1/online"])
    try:
        found = job.result()
        assert found.status == 0, found
        later = [line for line in found.json_lines() if line.get("again") and line["env"]["RANK"] == "0"]
        assert 1 not in later[0]["cpus"]
        planned = check(machine, TWO)
        assert 1 not in {core for rank in planned["ranks"] for core in rank["cores"]}
    finally:
        machine.check(["sh", "-c", "echo 1 > /sys/devices/system/cpu/cpu1/online"])


@on("four-nodes")
def test_a_launch_within_a_launch(machine: Machine) -> None:
    """The inner one divides what its rank was given."""
    outer = [COMMAND, "run", "--no_python", "--no_local_rank", *TWO, COMMAND]
    found = machine.check([*outer, "bind", "--", sys.executable, WHERE])
    lines = found.json_lines()
    assert len(lines) == 2
    assert not set(lines[0]["cpus"]) & set(lines[1]["cpus"])
    lines = machine.check([*outer, "run", *TWO, WHERE]).json_lines()
    assert len(lines) == 4
    cpus = [cpu for line in lines for cpu in line["cpus"]]
    assert len(cpus) == len(set(cpus)) == 8


@on("four-nodes")
@pytest.mark.parametrize(
    "launcher",
    [
        ("mpirun.openmpi", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-np", "4"),
        ("mpiexec.mpich", "-np", "4"),
    ],
    ids=lambda words: str(words[0]),
)
def test_bind_below_other_launchers(machine: Machine, launcher: tuple[str, ...]) -> None:
    if machine.run(["which", launcher[0]]).status:
        pytest.skip(f"needs {launcher[0]}")
    found = machine.check([*launcher, COMMAND, "bind", "--", sys.executable, WHERE], seconds=240)
    lines = found.json_lines()
    assert len(lines) == 4, found
    for line in lines:
        node = line["cpus"][0] // 2
        assert line["cpus"] == [2 * node, 2 * node + 1]
        assert (line["policy"], line["nodes"], list(line["pages"])) == ("bind", [node], [str(node)])
    assert len({tuple(line["cpus"]) for line in lines}) == 4


# Slurm of one host, with a key of munge. It asks for an address that is not of the loopback, and for systemd's group.
SLURM = """
ip addr add 10.78.1.1/32 dev lo
mkdir -p /run/munge /run/slurm/state /run/slurm/spool /etc/slurm /sys/fs/cgroup/system.slice
echo "$CONFIG" > /etc/slurm/slurm.conf && echo IgnoreSystemd=yes > /etc/slurm/cgroup.conf
head -c 1024 /dev/urandom > /run/munge/munge.key && chmod 400 /run/munge/munge.key
cd /run/munge
munged --force --key-file=$PWD/munge.key --pid-file=$PWD/munged.pid --seed-file=$PWD/munged.seed > /dev/null 2>&1
slurmctld > /dev/null 2>&1; slurmd > /dev/null 2>&1
until sinfo -h -o %T | grep -q idle; do sleep 1; done
"""


@pytest.fixture(scope="module")
def srun(machine: Machine) -> str:
    missing = [name for name in ("srun", "slurmctld", "slurmd", "munged") if machine.run(["which", name]).status]
    if missing:
        pytest.skip(f"needs Slurm and munge: {', '.join(missing)}")
    node = f"NodeName={machine.shape.name} CPUs=8 Sockets=4 CoresPerSocket=2 State=UNKNOWN"
    config = SLURM_CONFIG.format(first=machine.shape.name, first_address="127.0.0.1", nodes=node)
    machine.check(["sh", "-c", SLURM], env={"CONFIG": config}, seconds=120)
    return "srun"


@on("four-nodes")
@pytest.mark.parametrize("bound", ["none", "cores"])
def test_bind_below_srun(machine: Machine, srun: str, bound: str) -> None:
    """As many tasks as nodes: each has one to itself, whether Slurm has chosen its cores or not."""
    found = machine.check(
        [srun, "-n", "4", "-c", "2", f"--cpu-bind={bound}", COMMAND, "bind", "--", sys.executable, WHERE], seconds=240
    )
    lines = found.json_lines()
    assert sorted(line["cpus"] for line in lines) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for line in lines:
        node = line["cpus"][0] // 2
        assert (line["policy"], line["nodes"], list(line["pages"])) == ("bind", [node], [str(node)])


@on("four-nodes")
def test_bind_below_torchrun(machine: Machine) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    found = machine.check([*torchrun, COMMAND, "bind", "--", sys.executable, WHERE], seconds=400)
    assert sorted(line["cpus"] for line in found.json_lines()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
