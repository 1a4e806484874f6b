# SPDX-License-Identifier: Apache-2.0
"""CPU lists and the questions that a Machine answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.topology import Cpu, Machine, NumaNode, format_cpu_list, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("\n", ()),
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("0-1,4,6-7", (0, 1, 4, 6, 7)),
        (" 2 , 0 - 1 ", (2, 0, 1)),
        ("5,5", (5, 5)),
    ],
)
def test_parse_keeps_order_and_duplicates(text, numbers):
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "3-1", "0-99999999999", "70000", "1.5", "٣", "1-2-3", ","])
def test_parse_refuses_with_the_part_that_is_wrong(text):
    with pytest.raises(ValueError, match="'"):
        parse_cpu_list(text)


@given(st.lists(st.integers(0, 300)))
def test_format_is_the_opposite_of_parse(numbers):
    assert parse_cpu_list(format_cpu_list(numbers)) == tuple(numbers)


def test_format_is_short():
    assert format_cpu_list([0, 1, 2, 8, 4, 5]) == "0-2,8,4-5"


def smt_machine(allowed=range(8)):
    """Two packages, two cores each, two threads each, numbered as Linux does on x86."""
    cpus = [Cpu(i, i % 4 // 2, 0, i % 2, i % 4 // 2, (i % 4, i % 4 + 4)) for i in range(8)]
    nodes = (NumaNode(0, (0, 1, 4, 5), 8 << 30, {0: 10, 1: 21}), NumaNode(1, (2, 3, 6, 7), 8 << 30))
    return Machine(tuple(cpus), nodes, tuple(allowed), (0, 1))


def test_cores_have_one_thread_each():
    assert [cpu.id for cpu in smt_machine().cores()] == [0, 1, 2, 3]


def test_cores_take_the_lowest_allowed_thread():
    assert [cpu.id for cpu in smt_machine([1, 4, 5, 7]).cores()] == [1, 4, 7]
    assert {node: [cpu.id for cpu in cores] for node, cores in smt_machine([7, 4]).nodes_with_cores().items()} == {
        0: [4],
        1: [7],
    }


def test_nodes_come_package_by_package():
    cpus = tuple(Cpu(i, package=i % 2, node=i, siblings=(i,)) for i in range(4))
    nodes = tuple(NumaNode(i, (i,), 1) for i in range(4))
    assert list(Machine(cpus, nodes, (0, 1, 2, 3), (0,)).nodes_with_cores()) == [0, 2, 1, 3]


def test_summary_is_one_line():
    assert smt_machine([0, 1, 2]).summary() == (
        "2 packages, 2 NUMA nodes (8.0 GiB, 8.0 GiB), 4 cores, 2 threads each; allowed: 0-2"
    )
    one = Machine((Cpu(0, siblings=(0,)),), (NumaNode(0, (0,), 0),), (0,), ())
    assert one.summary() == "1 package, 1 NUMA node (no memory), 1 core, 1 thread each; allowed: 0"


def test_summary_of_many_nodes_and_hybrid_cores():
    cpus = (Cpu(0, siblings=(0, 1)), Cpu(1, siblings=(0, 1)), Cpu(2, siblings=(2,)))
    nodes = tuple(NumaNode(i, (0, 1, 2) if i == 0 else (), 1 << 30) for i in range(5))
    assert Machine(cpus, nodes, (0, 1, 2), (0,)).summary() == (
        "1 package, 5 NUMA nodes (5.0 GiB in all), 2 cores, 1-2 threads each; allowed: 0-2"
    )


def test_look_up_by_id():
    machine = smt_machine()
    assert machine.cpu(5).id == 5
    assert machine.cpu(99) is None
    assert machine.node(1).cpus == (2, 3, 6, 7)
    assert machine.node(9) is None
