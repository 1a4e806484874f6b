# SPDX-License-Identifier: Apache-2.0
"""Hosts that are one machine divide its cores and devices; nobody gets what another has."""

import socket

import pytest

from anyaccel.errors import UsageError
from anyaccel.launch.cluster import address
from anyaccel.launch.cluster.machines import names_of_this_machine, same_machines
from anyaccel.launch.cluster.task import Task
from anyaccel.launch.job import Host
from anyaccel.launch.plan import planning
from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.topology import Cpu, Machine, NumaNode


def a_task(*slots, **options):
    hosts = tuple(Host(f"host{number}", tuple(each)) for number, each in enumerate(slots))
    return Task(LaunchOptions("x.py", **options), hosts, {}, "/")


def on(machine, *cpus):
    return {"machine": machine, "cpus": list(cpus)}


@pytest.mark.parametrize(
    ("ready", "groups"),
    [
        ([on("a", 0, 1), on("b", 0, 1)], []),
        ([on("a", 0, 1), on("a", 0, 1)], [[0, 1]]),
        ([on("a", 0, 1), on("b", 0, 1), on("a", 0, 1), on("b", 0, 1)], [[0, 2], [1, 3]]),
        ([on("a", 0, 1), on("a", 2, 3)], []),  # containers, each with cores of its own
        ([on("", 0, 1), on("", 0, 1)], []),  # nobody knows
    ],
)
def test_which_hosts_are_one_machine(ready, groups):
    task = a_task(*[[0]] * len(ready), bind_cores=True)
    assert same_machines(task, dict(enumerate(ready))) == groups


def test_cores_that_are_shared_in_part_cannot_be_divided():
    ready = {0: on("a", 0, 1, 2), 1: on("a", 2, 3)}
    with pytest.raises(UsageError, match="host0 and host1 are one machine and share CPU 2"):
        same_machines(a_task([0], [0], bind_cores=True), ready)
    assert same_machines(a_task([0], [0]), ready) == []  # nobody is bound


def machine(*cores_per_node):
    node_of = [node for node, count in enumerate(cores_per_node) for _ in range(count)]
    cpus = tuple(Cpu(number, node=node) for number, node in enumerate(node_of))
    nodes = tuple(
        NumaNode(node, tuple(cpu.id for cpu in cpus if cpu.node == node), 1 << 30)
        for node in range(len(cores_per_node))
    )
    return Machine(cpus, nodes, tuple(range(len(cpus))), tuple(range(len(nodes))))


@pytest.mark.parametrize(
    ("slots", "cores"),
    [
        ([[0], [0]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[0], [0, 1], [0]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_names_of_one_machine_divide_its_cores_and_devices(monkeypatch, slots, cores):
    monkeypatch.setattr(planning, "read_machine", lambda: machine(4, 4))
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3,4,5,6")
    task = a_task(*slots, bind_cores=True)
    together = Task(task.options, task.hosts, {}, "/", "", tuple(range(len(slots))))
    plans = [together.plan(node) for node in range(len(slots))]
    ranks = [binding for plan in plans for binding in plan.ranks]
    assert [list(binding.cores) for binding in ranks] == cores
    assert [binding.rank for binding in ranks] == list(range(len(cores)))
    # Each name of the machine is a host of its own otherwise.
    assert [binding.local_rank for binding in ranks] == [rank for each in slots for rank in range(len(each))]
    devices = []
    for plan in plans:
        # What a worker takes: that of its LOCAL_RANK, of those that it sees.
        visible = plan.ranks[0].env.get("ZE_AFFINITY_MASK", "3,4,5,6").split(",")
        devices += [visible[binding.local_rank] for binding in plan.ranks]
    assert len(set(devices)) == len(devices)


ADDRESSES = {
    "localhost": "127.0.0.1",
    "127.0.0.1": "127.0.0.1",
    "a": "10.0.0.1",
    "10.0.0.1": "10.0.0.1",
    "a-too": "10.0.0.1",
    "b": "10.0.0.2",
    "10.0.0.2": "10.0.0.2",
}


@pytest.mark.parametrize("its_name", ["a", "elsewhere"])
@pytest.mark.parametrize(
    ("names", "node", "master", "found"),
    [
        (["a", "b"], 0, "a", [0]),
        (["a", "b", "a-too"], 0, "a", [0, 2]),
        (["a", "b", "user@a-too"], 2, "10.0.0.1", [0, 2]),
        (["localhost", "a"], 0, "10.0.0.1", [0, 1]),
        (["localhost", "a"], 1, "10.0.0.1", [0, 1]),
        (["localhost", "a"], 1, "10.0.0.2", [1]),  # host 0 runs on b, and calls itself localhost
        (["localhost", "127.0.0.1", "b"], 1, "10.0.0.1", [0, 1]),
        (["localhost", "b"], 0, "127.0.0.1", [0, 1]),  # rank 0 can be reached from this machine only
        (["", "", ""], 1, "localhost", [0, 1, 2]),
        (["", "", ""], 1, "10.0.0.1", [1]),
        (["pod", "b"], 0, "10.0.0.1", [0]),  # no such name
        (["b", "localhost"], 1, "10.0.0.2", [1]),
        (["a", "localhost"], 0, "10.0.0.1", "host localhost means another machine on each host"),
    ],
)
def test_names_of_this_machine_where_nobody_can_ask(monkeypatch, its_name, names, node, master, found):
    """This machine has the address 10.0.0.1."""

    def answer(name, *_, **__):
        if name not in ADDRESSES:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ADDRESSES[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(socket, "gethostname", lambda: its_name)
    monkeypatch.setattr(address, "_is_local_address", lambda _, number: number in ("10.0.0.1", "127.0.0.1"))
    if isinstance(found, str):
        with pytest.raises(UsageError, match=found):
            names_of_this_machine(names, node, master)
    else:
        assert names_of_this_machine(names, node, master) == found
