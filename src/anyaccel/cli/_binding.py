# SPDX-License-Identifier: Apache-2.0
"""The options about binding, which run, bind and topo share."""

from __future__ import annotations

import argparse

from anyaccel.cli._parser import Parser
from anyaccel.launch.plan.options import ALLOCATORS, MEMORY_POLICIES, parse_core_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def add_binding_options(parser: Parser) -> None:
    """Add the options that `binding_options` reads."""
    add = parser.add_argument
    add("--bind_cores_to_rank", action="store_true", help="bind each worker to its own cores and memory")
    add("--bind_core_list", metavar="LIST", help="CPUs to divide among workers, such as 0-27,32-59")
    add("--smt", action="store_true", help="give a worker all threads of its cores; default: one of each core")
    add("--cores-reserved", type=int, default=0, metavar="N", help="leave the last N cores of each node to the system")
    add(
        "--mem-policy",
        choices=MEMORY_POLICIES,
        default="auto",
        metavar="POLICY",
        help=f"memory of a bound worker: {', '.join(MEMORY_POLICIES)}; default: auto, its own node",
    )
    add(
        "--malloc",
        choices=ALLOCATORS,
        default="default",
        metavar="LIB",
        help=f"allocator to preload: {', '.join(ALLOCATORS)}",
    )
    add("--strict", action="store_true", help="make every warning about the binding an error")


def binding_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of these options, as keyword arguments of `BindingOptions` and `LaunchOptions`.

    Raises:
        UsageError: --bind_core_list is no list of CPUs.
    """
    return {
        "bind_cores": arguments.bind_cores_to_rank,
        "core_list": None if arguments.bind_core_list is None else parse_core_list(arguments.bind_core_list),
        "smt": arguments.smt,
        "memory_policy": arguments.mem_policy,
        "cores_reserved": arguments.cores_reserved,
        "malloc": arguments.malloc,
        "strict": arguments.strict,
    }
