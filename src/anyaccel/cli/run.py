# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run`: start a script on every device of this machine, or of several hosts."""

from __future__ import annotations

import argparse
import os
import sys

from anyaccel import launch
from anyaccel.cli._binding import add_binding_options, binding_options
from anyaccel.cli._parser import Parser
from anyaccel.errors import UsageError
from anyaccel.launch.local.command import worker_command
from anyaccel.launch.output import LEVELS
from anyaccel.launch.plan.options import DEFAULT_GRACE_PERIOD, DEFAULT_HOSTFILE, LaunchOptions, parse_elastic
from anyaccel.terminal import fitted, styled, table_width
from anyaccel.topology import read_machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.launch.cluster.cluster import ClusterOptions

# The fields of `ClusterOptions` and their defaults, which are copied so that a launch on this machine alone does not
# import its module.
_CLUSTER_DEFAULTS: dict[str, object] = {
    "hostfile": None,
    "include": "",
    "exclude": "",
    "num_nodes": None,
    "node_rank": None,
    "no_ssh": False,
    "force_multi": False,
    "launcher": None,
    "launcher_args": "",
    "ssh_port": None,
    "exports": (),
}
_LAUNCHERS = "ssh, pdsh, openmpi, mpich, impi, mvapich, slurm"

_EXAMPLES = """\
  one worker for each device (on a CPU: for each NUMA node)
      anyaccel run train.py --epochs 3
  two workers, each on its own half of the cores
      anyaccel run --num_accelerators 2 --bind_cores_to_rank train.py
  four workers, on CPUs 0-13, 14-27, 32-45 and 46-59
      anyaccel run --num_accelerators 4 --bind_core_list 0-27,32-59 train.py
  show the plan and start nothing
      anyaccel run --bind_cores_to_rank --dry-run train.py
  all hosts of a file with lines such as: node1 slots=2
      anyaccel run --hostfile hosts --bind_cores_to_rank train.py
  slots 0 and 1 of node1 and all of node2, through Intel MPI
      anyaccel run --hostfile hosts --include node1:0,1@node2 --launcher impi train.py
  one log file for each rank, also shown here, each line with its rank
      anyaccel run --enable_each_rank_log logs --tee --rank-prefix train.py
  start all workers again after a failure, up to three times
      anyaccel run --max-restarts 3 train.py
  a script that imports deepspeed, on anyaccel
      anyaccel run --as-deepspeed --bind_cores_to_rank inference.py
  a script that names CUDA, unchanged, on what this machine has
      anyaccel run --as-cuda --no_local_rank train.py
  a module that does not know --local_rank; a program that is not Python
      anyaccel run --no_local_rank -m package.module --flag
      anyaccel run --no_local_rank --no_python ./program argument
"""


def build_parser() -> Parser:
    parser = Parser(
        "run",
        "Start a script once for each device of this machine, or of several hosts, with the environment that\n"
        "torch.distributed expects. When one worker fails, or this command is ended, no process of the job is left.",
        _EXAMPLES,
    )
    parser.usage = "anyaccel run [options] script [args ...]"
    add = parser.add_argument
    add(
        "--num_accelerators",
        "--num_gpus",
        type=int,
        metavar="N",
        help="workers on each host; default: one for each device",
    )
    add("--master_addr", metavar="ADDR", help="address of rank 0; default: 127.0.0.1, or as other hosts see the first")
    add("--master_port", type=int, metavar="PORT", help="TCP port of rank 0; default: a free one")
    add("-m", "--module", action="store_true", help="script is a module, run as python -m does")
    add("--no_python", action="store_true", help="script is a program, run without Python")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("--venv_script", metavar="FILE", help="source this before each worker, which then uses its python")
    add(
        "--grace-period",
        type=float,
        metavar="S",
        default=DEFAULT_GRACE_PERIOD,
        help="seconds between SIGTERM and SIGKILL when workers are ended; default: %(default)g",
    )
    add("--as-deepspeed", action="store_true", help="in this job, let `import deepspeed` import anyaccel's alias")
    add(
        "--as-cuda",
        action="store_true",
        help="in this job, code that names CUDA uses this machine's accelerator; --as-cuda=report,json,amp: print what "
        "was redirected (as JSON), use mixed precision on CPUs",
    )
    add("--as-cuda-options", default="", help=argparse.SUPPRESS)
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--json", action="store_true", help="with --dry-run: print the plan as JSON")
    add_binding_options(parser)
    _add_output_options(parser)
    _add_cluster_options(parser)
    # One argument takes everything, since argparse would otherwise drop a `--` that is meant for the script.
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script [args ...]", help="the script and its arguments"
    )
    return parser


def _add_output_options(parser: Parser) -> None:
    add = parser.group("output")
    add("--enable_each_rank_log", metavar="DIR", help="write the output of each rank to a separate file in DIR")
    add("--tee", action="store_true", help="with --enable_each_rank_log: show the output here as well")
    add("--rank-prefix", action="store_true", help="begin each line of a worker with [rankN]")
    add("--save_pid", action="store_true", help="write the launcher's process id to a file, and print its path")
    add(
        "--log_level",
        choices=LEVELS,
        default="info",
        metavar="LEVEL",
        help=f"what to print: {', '.join(LEVELS)}; default: info",
    )
    add("-q", "--quiet", action="store_true", help="print errors only")


def _add_cluster_options(parser: Parser) -> None:
    add = parser.group("several hosts")
    add("--hostfile", "-H", metavar="FILE", help="file with one `name slots=N` on each line; default: /job/hostfile")
    add("--include", "-i", default="", metavar="LIST", help="use only these hosts and slots, such as node1:0,1@node2")
    add("--exclude", "-e", default="", metavar="LIST", help="use all except these hosts and slots")
    add("--num_nodes", type=int, metavar="N", help="use only the first N hosts")
    add("--launcher", metavar="NAME", help=f"{_LAUNCHERS}; default: ssh")
    add("--launcher_args", default="", metavar="ARGS", help="more arguments for the launcher, quoted as one word")
    add("--ssh_port", "-p", type=int, metavar="PORT", help="TCP port of sshd on all hosts")
    add(
        "--export",
        action="append",
        default=[],
        metavar="NAME",
        help="variable for all hosts, or NAME=VALUE; repeatable",
    )
    add("--no_ssh", action="store_true", help="start only this host's workers; you run this command on each host")
    add("--node_rank", type=int, metavar="N", help="with --no_ssh: number of this host")
    add("--force_multi", action="store_true", help="use the launcher even if this is the only host")
    add("--max-restarts", type=int, metavar="N", help="start all workers again after a failure (torch elastic)")
    add("--elastic", metavar="MIN:MAX", help="go on with MIN to MAX hosts (torch elastic)")


def _launch_options(arguments: argparse.Namespace) -> LaunchOptions:
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    return LaunchOptions(
        script=command[0] if command else "",
        script_args=tuple(command[1:]),
        num_accelerators=arguments.num_accelerators,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        module=arguments.module,
        no_python=arguments.no_python,
        local_rank_argument=not arguments.no_local_rank,
        grace_period=arguments.grace_period,
        venv_script=arguments.venv_script,
        max_restarts=arguments.max_restarts,
        elastic=None if arguments.elastic is None else parse_elastic(arguments.elastic),
        log_dir=arguments.enable_each_rank_log,
        tee=arguments.tee,
        rank_prefix=arguments.rank_prefix,
        log_level="error" if arguments.quiet else arguments.log_level,
        **binding_options(arguments),
    )


def _job_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The environment variables that every worker of the job gets."""
    found: dict[str, str] = {}
    if arguments.as_deepspeed:
        from anyaccel import compat

        found = compat.job_environment(os.environ)
    if arguments.as_cuda or arguments.as_cuda_options:
        from anyaccel.cuda_job import CudaJobOptions, job_environment

        found |= job_environment(CudaJobOptions.parse(arguments.as_cuda_options), {**os.environ, **found})
    return found


def _cluster_options(arguments: argparse.Namespace) -> ClusterOptions | None:
    """The options about several hosts; None for a launch on this machine alone."""
    ours = tuple(f"{name}={value}" for name, value in _job_environment(arguments).items())
    arguments.exports = (*arguments.export, *ours)
    given: dict[str, Any] = {name: getattr(arguments, name) for name in _CLUSTER_DEFAULTS}
    on_this_machine = given == {**_CLUSTER_DEFAULTS, "exports": ours}
    plain = on_this_machine and arguments.max_restarts is None and arguments.elastic is None
    if plain and not os.path.exists(DEFAULT_HOSTFILE):
        return None
    from anyaccel.launch.cluster.cluster import ClusterOptions

    return ClusterOptions(**given)


def _show(options: LaunchOptions, as_json: bool, extra_env: dict[str, str]) -> None:
    """Print the plan and the commands of a launch on this machine."""
    launch.check_script(options, os.environ.get("PATH", os.defpath))
    machine = read_machine()
    plan = launch.make_plan(options, machine, extra_env=extra_env)
    commands = [worker_command(options, binding) for binding in plan.ranks]
    if as_json:
        import json  # this takes 4 ms, which a launch need not spend

        ranks = plan.to_dict()
        print(json.dumps({"topology": machine.summary(), **ranks, "commands": commands}, indent=2))
        return
    import shlex

    lines = [f"topology: {machine.summary()}", plan.render(), f"  command of rank 0: {shlex.join(commands[0])}"]
    print(styled(fitted("\n".join(lines), table_width(sys.stdout)), "plan", sys.stdout))


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code of the job."""
    # argparse would take the script for the value of an option that may have one or none.
    argv = [f"--as-cuda-options={each[10:]}" if each.startswith("--as-cuda=") else each for each in argv]
    arguments = build_parser().parse_args(argv)
    if arguments.json and not arguments.dry_run:
        raise UsageError("--json prints the plan and goes with --dry-run; add --dry-run, or leave --json out")
    options = _launch_options(arguments)
    cluster = _cluster_options(arguments)
    if not arguments.save_pid or arguments.dry_run:
        return _run(arguments, options, cluster)
    from anyaccel.launch.pid_file import pid_file

    with pid_file() as path:
        if not arguments.quiet:
            print(f"anyaccel: process id {os.getpid()} is in {path}", flush=True)
        return _run(arguments, options, cluster)


def _run(arguments: argparse.Namespace, options: LaunchOptions, cluster: ClusterOptions | None) -> int:
    if cluster is not None:
        from anyaccel.cli._cluster import run_or_show

        return run_or_show(options, cluster, dry_run=arguments.dry_run, as_json=arguments.json)
    if arguments.dry_run:
        _show(options, arguments.json, _job_environment(arguments))
        return 0
    return launch.run(options, extra_env=_job_environment(arguments))
