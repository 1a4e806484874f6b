# SPDX-License-Identifier: Apache-2.0
"""`anyaccel bind`: bind this process by its local rank, then replace it by the command."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from anyaccel.cli._binding import add_binding_options, binding_options
from anyaccel.cli._parser import Parser
from anyaccel.errors import UsageError
from anyaccel.launch.counts import MOST_ON_A_HOST
from anyaccel.launch.local.apply import EXIT_NOT_BOUND, bind_this_process
from anyaccel.launch.local.binder import bound_mark, cpus_of_launcher, given_by_hand, plan_rank
from anyaccel.launch.plan.ancestors import BOUND, Ancestors, read_ancestors
from anyaccel.launch.plan.local_rank import RankFromEnvironment, rank_from_environment
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.launch.plan.plan import describe
from anyaccel.terminal import fitted, marked, styled, table_width
from anyaccel.topology import read_machine

# A shell has these exit codes for a program that does not exist, and for one that cannot be run.
_NOT_FOUND = 127
_NOT_RUNNABLE = 126

_EXAMPLES = """\
  under another launcher: every process takes its part of its machine
      torchrun --nproc-per-node 2 --no-python anyaccel bind -- python train.py
      mpirun --bind-to none -np 4 anyaccel bind -- python train.py
      srun --cpu-bind=none anyaccel bind --malloc tcmalloc -- ./program
  by hand
      anyaccel bind --local_rank 1 --local_size 2 -- python serve.py
  what each of four ranks would get here
      anyaccel bind --local_size 4 --dry-run
"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "bind",
        "Bind this process to the part of the machine of its local rank, and run the command in its place.\n"
        "The rank comes from torchrun, an MPI, Slurm, PALS, jsrun or Flux; each machine makes its own plan.",
        _EXAMPLES,
    )
    parser.usage = "anyaccel bind [options] -- command [args ...]"
    add = parser.add_argument
    add("--local_rank", type=int, metavar="N", help="number of this process on this machine; default: the launcher's")
    add("--local_size", type=int, metavar="N", help="number of processes of this machine; default: the launcher's")
    add_binding_options(parser)
    add("--dry-run", action="store_true", help="print what each local rank would get, and run nothing")
    add("command", nargs=argparse.REMAINDER, metavar="command [args ...]", help="the command and its arguments")
    return parser


def main(argv: list[str]) -> int:
    """Replace this process by the command; returns only where that fails."""
    arguments = build_parser().parse_args(argv)
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command and not arguments.dry_run:
        raise UsageError("no command was given; put it after --, as in: anyaccel bind -- python train.py")
    options = BindingOptions(**{**binding_options(arguments), "bind_cores": True})
    ancestors = read_ancestors(os.environ)
    found = _find_rank(arguments, ancestors)
    machine = read_machine()
    plan = plan_rank(options, machine, found, os.environ, cpus_of_launcher(ancestors, found.variable), ancestors)
    if arguments.dry_run:
        lines = [
            f"topology: {machine.summary()}",
            *(f"local rank {binding.local_rank}: {describe(binding)}" for binding in plan.ranks),
            *(f"warning: {text}" for text in plan.warnings),
            *(f"note: {text}" for text in (*plan.announcements, *plan.notes)),
        ]
        print(styled(fitted("\n".join(lines), table_width(sys.stdout)), "plan", sys.stdout))
        return 0
    if found.local_rank == 0:  # the other ranks would repeat its warnings
        for text in plan.warnings:
            _say(f"warning: {text}")
        for text in plan.announcements:
            _say(text)
    binding = plan.ranks[found.local_rank]
    problems = bind_this_process(binding)
    for problem in problems:
        _say(f"{'error' if options.strict else 'warning'}: {problem}")
    if problems and options.strict:
        return EXIT_NOT_BOUND
    mark = {} if problems else {BOUND: bound_mark(found, os.sched_getaffinity(0))}
    return _exec(command, {**os.environ, **binding.env, **mark})


def _find_rank(arguments: argparse.Namespace, ancestors: Ancestors | None) -> RankFromEnvironment:
    rank, size = arguments.local_rank, arguments.local_size
    if rank is None and size is None:
        return rank_from_environment(os.environ, ancestors=ancestors)
    if rank is None and arguments.dry_run:
        rank = 0
    if rank is None or size is None:
        missing, given = ("--local_size", "--local_rank") if size is None else ("--local_rank", "--local_size")
        raise UsageError(f"{given} was given without {missing}; give both, or neither where a launcher says them")
    if not 0 <= rank < size:
        raise UsageError(f"--local_rank is {rank}, it must be at least 0 and below --local_size, which is {size}")
    if size > MOST_ON_A_HOST:
        raise UsageError(f"--local_size is {size}, one machine has at most {MOST_ON_A_HOST} processes of a job")
    return given_by_hand(rank, size)


def _exec(command: list[str], environment: dict[str, str]) -> int:
    sys.stdout.flush()
    # Python ignores these two signals, and an exec would keep that, but programs expect the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        _say(f"error: {command[0]!r} was not found; check the name, or the interpreter in its first line")
        return _NOT_FOUND
    except (OSError, ValueError) as error:
        _say(f"error: {command[0]!r} cannot be started: {error}")
        return _NOT_RUNNABLE


def _say(text: str) -> None:
    print(f"anyaccel: {marked(text, sys.stderr)}", file=sys.stderr, flush=True)
