# SPDX-License-Identifier: Apache-2.0
"""`anyaccel topo`: draw this machine or a recorded one, and the cores that each rank would get."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anyaccel.cli._binding import add_binding_options, binding_options
from anyaccel.cli._parser import Parser
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.launch.plan.plan import HostPlace, LaunchPlan, RankBinding
from anyaccel.launch.plan.planning import make_plan
from anyaccel.report.topo import RankCores, short_list, to_dict
from anyaccel.report.topo_text import WIDTH, plain, render
from anyaccel.terminal import table_width
from anyaccel.topology import Machine, read_machine
from anyaccel.topology.details import read_details
from anyaccel.topology.sysfs import check_recording
from anyaccel.validation import create_file

_EXAMPLES = """\
  this machine: packages, NUMA nodes, cores, caches, accelerators
      anyaccel topo
  which cores four workers would get, as a picture too
      anyaccel topo --num_accelerators 4 --bind_cores_to_rank --svg machine.svg
      anyaccel topo --num_accelerators 4 --bind_core_list 0-27,32-59
  everything that is known, for programs
      anyaccel topo --json | jq '.nodes[].memory_bytes'
  another machine, recorded there; docs/topology.md says how
      anyaccel topo --sysfs-root machine/ --bind_cores_to_rank
"""
_MEMORY = {"bind": "memory of {}", "preferred": "memory of {} first", "interleave": "memory of {} in turn"}


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "topo",
        "Draw the topology of this machine: packages, NUMA nodes with their memory, cores, threads, caches and\n"
        "accelerators; with options of `anyaccel run` also which rank would get what. Starts nothing.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--svg", metavar="FILE", help="write a picture as well; - prints it instead of the text")
    add("--sysfs-root", metavar="DIR", help="read a recorded machine: a folder with its sys/ and proc/")
    add("--num_accelerators", "--num_gpus", type=int, metavar="N", help="show the plan for N workers")
    add_binding_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    if arguments.json and arguments.svg == "-":
        raise UsageError("--json and --svg - would both be printed; give --svg a file")
    root: str | None = arguments.sysfs_root
    if root is not None:
        check_recording(root)
    machine = read_machine(root)
    plan = _plan(arguments, machine, root)
    details = read_details(machine, root)
    shares = [RankCores(binding.rank, binding.cores, _memory_text(binding)) for binding in plan.ranks] if plan else []

    if arguments.svg is not None:
        from anyaccel.report.topo_svg import render_svg

        picture = render_svg(machine, details, shares)
        if arguments.svg == "-":
            print(picture.encode("ascii", "xmlcharrefreplace").decode(), end="")
            return 0
        _write(arguments.svg, picture)
    if arguments.json:
        print(json.dumps({**to_dict(machine, details), "plan": _plan_dict(plan)}, indent=2))
    else:
        _print(render(machine, details, shares, _remarks(plan), table_width(sys.stdout) or WIDTH))
    return 0


def _plan(arguments: argparse.Namespace, machine: Machine, root: str | None) -> LaunchPlan | None:
    """The plan of `anyaccel run` with the same options; None where none of them is given."""
    given: dict[str, Any] = binding_options(arguments)
    script = "anyaccel topo"  # a plan needs the name of a script, but nothing is started
    options = LaunchOptions(script, num_accelerators=arguments.num_accelerators, **given)
    if options == LaunchOptions(script):
        return None
    return make_plan(options, machine, place=HostPlace(), root=root or "")


def _memory_text(binding: RankBinding) -> str:
    nodes = f"node{'s' if len(binding.memory_nodes) > 1 else ''} {short_list(binding.memory_nodes)}"
    return _MEMORY.get(binding.memory_policy, "memory of any node").format(nodes)


def _plan_dict(plan: LaunchPlan | None) -> dict[str, Any] | None:
    """The plan without the address of rank 0, which is known only once a job starts."""
    if plan is None:
        return None
    shown: dict[str, Any] = plan.to_dict()
    ranks = [{**rank, "env": _without_master(rank["env"])} for rank in shown["ranks"]]
    return {**_without_master(shown), "ranks": ranks}


def _without_master(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.lower().startswith("master_")}


def _remarks(plan: LaunchPlan | None) -> list[str]:
    if plan is None:
        return []
    lines = [f"reserved cores: {short_list(plan.reserved)}"] if plan.reserved else []
    if plan.bound:
        lines.append(f"left-over cores: {short_list(plan.left_over) or 'none'}")
    else:
        lines.append("workers are not bound; add --bind_cores_to_rank to give each its own cores")
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def _print(text: str) -> None:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = plain(text)
    print(text)


def _write(path: str, text: str) -> None:
    try:
        with create_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise AnyAccelError(
            f"--svg {path!r} cannot be written: {error.strerror}; give a file in a folder that is there and "
            "that you may write to"
        ) from None
