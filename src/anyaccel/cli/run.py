# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run`: start a script on every device of this machine."""

from __future__ import annotations

import argparse
import os

from anyaccel import launch
from anyaccel.cli._parser import Parser
from anyaccel.errors import UsageError
from anyaccel.launch.options import DEFAULT_GRACE_PERIOD, LaunchOptions, parse_core_list
from anyaccel.launch.runners import local
from anyaccel.topology import read_machine

_EXAMPLES = """\
  one worker per device (on CPU: per NUMA node)
      anyaccel run train.py --epochs 3
  two workers, each on its own half of the cores
      anyaccel run --num_accelerators 2 --bind_cores_to_rank train.py
  four workers, on CPUs 0-13, 14-27, 32-45 and 46-59
      anyaccel run --num_accelerators 4 --bind_core_list 0-27,32-59 train.py
  show the plan and start nothing
      anyaccel run --bind_cores_to_rank --dry-run train.py
  a module that does not know --local_rank; a program that is not Python
      anyaccel run --no_local_rank -m package.module --flag
      anyaccel run --no_local_rank --no_python ./program argument
"""


def build_parser() -> Parser:
    parser = Parser(
        "run",
        "Start a script once per device of this machine, in the environment that torch.distributed expects.\n"
        "When one worker fails, or this command is ended, nothing of the job stays alive.",
        _EXAMPLES,
    )
    parser.usage = "anyaccel run [options] script [args ...]"
    add = parser.add_argument
    add("--num_accelerators", "--num_gpus", type=int, metavar="N", help="workers; default: one per device")
    add("--bind_cores_to_rank", action="store_true", help="bind each worker to its own cores and memory")
    add("--bind_core_list", metavar="LIST", help="CPUs to divide among workers, such as 0-27,32-59")
    add("--master_addr", metavar="ADDR", help="address of rank 0; default: 127.0.0.1")
    add("--master_port", type=int, metavar="PORT", help="TCP port of rank 0; default: a free one")
    add("-m", "--module", action="store_true", help="script is a module, run as python -m does")
    add("--no_python", action="store_true", help="script is a program, run without Python")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add(
        "--grace-period",
        type=float,
        metavar="S",
        default=DEFAULT_GRACE_PERIOD,
        help="seconds between asking workers to end and killing them; default: %(default)g",
    )
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--json", action="store_true", help="with --dry-run: print the plan as JSON")
    # One argument that takes everything: argparse would drop a `--` that is meant for the script.
    add("command", nargs=argparse.REMAINDER, metavar="script [args ...]", help="what to run")
    return parser


def _options(arguments: argparse.Namespace) -> LaunchOptions:
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    return LaunchOptions(
        script=command[0] if command else "",
        script_args=tuple(command[1:]),
        num_accelerators=arguments.num_accelerators,
        bind_cores=arguments.bind_cores_to_rank,
        core_list=None if arguments.bind_core_list is None else parse_core_list(arguments.bind_core_list),
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        module=arguments.module,
        no_python=arguments.no_python,
        local_rank_argument=not arguments.no_local_rank,
        grace_period=arguments.grace_period,
    )


def _show(options: LaunchOptions, as_json: bool) -> None:
    """Print what would be started."""
    launch.check_script(options, os.environ.get("PATH", os.defpath))
    machine = read_machine()
    plan = launch.make_plan(options, machine)
    commands = [local.build_command(options, binding) for binding in plan.ranks]
    if as_json:
        import json  # 4 ms that a launch does not need

        ranks = plan.to_dict()
        print(json.dumps({"topology": machine.summary(), **ranks, "commands": commands}, indent=2))
        return
    import shlex

    print(f"topology: {machine.summary()}")
    print(plan.render())
    print(f"  command of rank 0: {shlex.join(commands[0])}")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code of the job."""
    arguments = build_parser().parse_args(argv)
    if arguments.json and not arguments.dry_run:
        raise UsageError("--json prints the plan and goes with --dry-run; add --dry-run, or leave --json out")
    options = _options(arguments)
    if arguments.dry_run:
        _show(options, arguments.json)
        return 0
    return launch.run(options)
