# SPDX-License-Identifier: Apache-2.0
"""Options that cannot be right are refused with the value and what to do."""

import pytest

from anyaccel.errors import UsageError
from anyaccel.launch import LaunchOptions
from anyaccel.launch.plan.options import BindingOptions, parse_core_list


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"script": ""}, "no script"),
        ({"num_accelerators": 0}, "is 0"),
        ({"num_accelerators": -2}, "is -2"),
        ({"master_addr": " "}, "--master_addr is empty"),
        ({"master_addr": "a b"}, r"--master_addr is 'a b', it must be the name of a host"),
        ({"master_addr": "node1 "}, "--master_addr is 'node1 '"),
        ({"master_addr": "node1\n"}, "--master_addr is"),
        ({"master_addr": "node1:29500"}, "a port goes into --master_port"),
        ({"master_addr": "-h"}, "--master_addr is '-h'"),
        ({"master_port": 0}, "is 0"),
        ({"master_port": 65536}, "is 65536"),
        ({"module": True, "no_python": True}, "contradict"),
        ({"grace_period": -1.0}, "is -1"),
        ({"grace_period": float("nan")}, "is nan"),
        ({"grace_period": float("inf")}, "is inf"),
        ({"max_restarts": -1}, "--max-restarts is -1, it must be 0 or more"),
        ({"elastic": (0, 2)}, "--elastic is 0:2, it must be MIN:MAX hosts with 1 <= MIN <= MAX"),
        ({"elastic": (3, 2)}, "--elastic is 3:2"),
        ({"core_list": ()}, "is empty"),
        ({"core_list": (0, 1, 0)}, "CPU 0 more than once"),
        ({"bind_cores": True, "cores_reserved": -1}, "--cores-reserved is -1"),
        ({"core_list": (0, 1), "cores_reserved": 1}, "leave the cores of the system out of the list"),
        ({"core_list": (0, 1), "smt": True}, "name the threads in the list"),
        ({"memory_policy": "all"}, "--mem-policy is 'all', it must be one of auto, bind"),
        ({"malloc": "mimalloc"}, "--malloc is 'mimalloc', it must be one of default, tcmalloc"),
        ({"smt": True}, "--smt is about workers that are bound to cores; add --bind_cores_to_rank"),
        ({"cores_reserved": 1}, "--cores-reserved is about workers that are bound"),
        ({"memory_policy": "bind"}, "--mem-policy bind is about workers that are bound"),
    ],
)
def test_refused(values, message):
    with pytest.raises(UsageError, match=message):
        LaunchOptions(**{"script": "x.py", **values})


@pytest.mark.parametrize("address", ["node-1.local", "10.0.0.1", "::1", "fe80::1%eth0", "my_host"])
def test_addresses(address):
    assert LaunchOptions("x.py", master_addr=address).master_addr == address


def test_a_core_list_implies_binding():
    assert LaunchOptions("x.py", core_list=(1, 0)).bind_cores
    assert not LaunchOptions("x.py").bind_cores
    assert BindingOptions(core_list=(1,)).bind_cores


def test_what_needs_no_binding():
    assert LaunchOptions("x.py", memory_policy="interleave", malloc="jemalloc", strict=True).bind_cores is False
    assert BindingOptions(memory_policy="none").memory_policy == "none"


def test_core_list_text():
    assert parse_core_list("4-5,0") == (4, 5, 0)
    with pytest.raises(UsageError, match=r"--bind_core_list '0-x': '0-x' is neither"):
        parse_core_list("0-x")
