# SPDX-License-Identifier: Apache-2.0
"""deepspeed.launcher.runner: the command `deepspeed`, hostfiles and filters.

The command is `anyaccel run` with DeepSpeed's options. Without --launcher, several hosts are reached by ssh (DeepSpeed
takes pdsh), and without --master_port rank 0 gets a free port.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyaccel.cli
from anyaccel.cli._parser import strict_numbers
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.launch.cluster.address import is_this_host
from anyaccel.launch.cluster.hostfile import parse_hostfile, read_hostfile, select_hosts
from anyaccel.launch.plan.options import DEFAULT_HOSTFILE as DLTS_HOSTFILE
from anyaccel.numerals import parse_integer

from .._cover import cover, refuse

__all__ = [
    "DLTS_HOSTFILE", "apply_num_nodes_and_gpus", "encode_world_info", "fetch_hostfile", "main", "parse_args",
    "parse_inclusion_exclusion", "parse_node_config", "parse_node_config_list", "parse_resource_filter",
]  # fmt: skip

# Options that `anyaccel run` has under the same name: with a value, and without.
_WITH_VALUE = ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port", "master_addr", "node_rank",
               "launcher", "launcher_args", "bind_core_list", "ssh_port", "venv_script", "enable_each_rank_log",
               "log_level")  # fmt: skip
_SWITCHES = ("module", "no_python", "no_local_rank", "no_ssh", "force_multi", "save_pid", "bind_cores_to_rank", "quiet")


class _Parser(argparse.ArgumentParser):
    """Options may be abbreviated, as DeepSpeed's may, where they mean one option only.

    argparse asks for the script's options too, and ends the program for one that could mean several of ours.
    """

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found = super()._get_option_tuples(option_string)
        by_action = {id(entry[0]): entry for entry in found}  # two spellings are one option
        return list(by_action.values()) if len(by_action) == 1 else []


def _parser() -> _Parser:
    parser = _Parser(
        prog="deepspeed", description="anyaccel run, with DeepSpeed's options; see also anyaccel run --help"
    )
    strict_numbers(parser)
    _add(parser, "-H", "--hostfile", default=DLTS_HOSTFILE, help="hosts, one `name slots=N` a line")
    _add(parser, "-i", "--include", default="", help="only these hosts and slots, as in worker-0@worker-1:0,2")
    _add(parser, "-e", "--exclude", default="", help="all but these hosts and slots")
    _add(parser, "--num_nodes", type=int, default=-1, help="only the first N hosts")
    _add(parser, "--num_gpus", "--num_accelerators", type=int, default=-1, help="workers a host")
    _add(parser, "--master_port", type=int, default=None, help="TCP port of rank 0; default: a free one")
    _add(parser, "--master_addr", default="", help="address of rank 0")
    _add(parser, "--node_rank", type=int, default=-1, help="with --no_ssh: number of this host")
    _add(parser, "--launcher", default="ssh", help="ssh, pdsh, openmpi, mpich, impi, mvapich or slurm")
    _add(parser, "--launcher_args", default="", help="more arguments for it, in one word")
    _add(parser, "--module", action="store_true", help="the script is a module")
    _add(parser, "--no_python", action="store_true", help="the script is a program")
    _add(parser, "--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    _add(parser, "--no_ssh", action="store_true", help="start only this host's workers")
    _add(parser, "--no_ssh_check", action="store_true", help="accepted: hosts that cannot be reached are named anyway")
    _add(parser, "--force_multi", action="store_true", help="use the launcher for one host too")
    _add(parser, "--save_pid", action="store_true", help="write this command's process id to a file")
    _add(parser, "--enable_each_rank_log", default="None", help="folder for the output of each rank")
    _add(parser, "--autotuning", default="", choices=("", "tune", "run"), help="not covered")
    _add(parser, "--bind_cores_to_rank", action="store_true", help="bind each worker to its own cores and memory")
    _add(parser, "--bind_core_list", default=None, help="CPUs to divide among workers, such as 0-27,32-59")
    _add(parser, "--ssh_port", type=int, default=None, help="TCP port of sshd on all hosts")
    _add(parser, "--venv_script", default=None, help="source this before each worker")
    _add(parser, "--log_level", default="info", choices=("debug", "info", "warning", "error", "critical"))
    _add(parser, "-q", "--quiet", action="store_true", help="say nothing but errors")
    # One argument that takes everything: argparse would drop a `--` that is meant for the script.
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="user_script [args ...]", help="what to run")
    return parser


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command `deepspeed`, under DeepSpeed's names and with its defaults where it has a value."""
    parser = _parser()
    options = parser.parse_args(args)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no script was given; put it after the options, as in: deepspeed [options] train.py")
    del options.command
    options.user_script, options.user_args = command[0], command[1:]
    return options


def _add(parser: argparse.ArgumentParser, *names: str, **kwargs: object) -> None:
    """An option, with dashes too, as in --bind-core-list."""
    action = parser.add_argument(*names, **kwargs)  # type: ignore[arg-type]
    for name in names:
        if "_" in name:
            parser._option_string_actions[f"--{name[2:].replace('_', '-')}"] = action


def anyaccel_arguments(options: argparse.Namespace) -> list[str]:
    """The same as arguments of `anyaccel`, whose command line is the contract (docs/adr/0007).

    Raises:
        NotCoveredError: --autotuning.
        UsageError: numbers of nodes or devices beside a filter of them, which DeepSpeed refuses too.
    """
    if (options.num_nodes >= 0 or options.num_gpus >= 0) and (options.include or options.exclude):
        given = "--num_nodes" if options.num_nodes >= 0 else "--num_gpus"
        other = "--include" if options.include else "--exclude"
        raise UsageError(f"{given} and {other} cannot be given together; name in {other} what is to be used")
    if options.autotuning:
        raise refuse("launcher --autotuning", "it tunes the training engine, which is out of scope; leave it out")
    default = _parser().get_default
    chosen = {**vars(options), "log_level": "error" if options.log_level == "critical" else options.log_level}
    values = [f"--{name}={chosen[name]}" for name in _WITH_VALUE if chosen[name] != default(name)]
    switches = [f"--{name}" for name in _SWITCHES if chosen[name]]
    return ["run", *values, *switches, "--", options.user_script, *options.user_args]


def _needs_no_launcher(options: argparse.Namespace) -> bool:
    """Whether DeepSpeed would leave --launcher aside: without a hostfile, and where only this host is left of it."""
    if options.force_multi or options.no_ssh or options.launcher.lower() in ("ssh", "slurm"):
        return False
    hosts = fetch_hostfile(options.hostfile)
    if hosts is None:
        return True
    left = select_hosts(hosts, options.include, options.exclude)
    return is_this_host(left[0].name) and (len(left) == 1 or options.num_nodes == 1)


def main(args: Sequence[str] | None = None) -> None:
    """The command; ends the process with the job's exit code where that is not 0.

    Args:
        args: of a program that calls this, which gets the errors of options as exceptions; None for those of the
            command line, whose errors are printed.

    Raises:
        UsageError, NotCoveredError: options contradict each other, or are not covered.
    """
    try:
        options = parse_args(args)
        if _needs_no_launcher(options):
            options.launcher = "ssh"  # the default, which a job of this host alone does not use
        arguments = anyaccel_arguments(options)
    except AnyAccelError as error:
        if args is not None:
            raise
        sys.stderr.write(f"deepspeed: error: {error}\n")
        sys.exit(error.exit_code)
    code = anyaccel.cli.main(arguments)
    if code:
        sys.exit(code)


def _parse_hostfile(hostfile_lines: Sequence[str]) -> dict[str, int]:
    """Slots of each host, of the lines of a hostfile; each has to say how many."""
    for line in hostfile_lines:
        text = line.partition("#")[0].strip()
        if text and "slots=" not in text:
            raise UsageError(f"hostfile: {text!r} does not say slots=N")
    return parse_hostfile("\n".join(hostfile_lines), "hostfile")


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Slots of each host; None where there is no such file.

    Raises:
        UsageError: it is no hostfile. Names the line.
    """
    return read_hostfile(hostfile_path) if Path(hostfile_path).is_file() else None


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """Host and slots of ``worker-1:0,2``; no slots stand for all.

    Raises:
        UsageError: a slot is not a number.
    """
    host, colon, slots = node_config.partition(":")
    try:
        return host, [parse_integer(number.strip()) for number in slots.split(",")] if colon else []
    except ValueError:
        raise UsageError(f"{node_config!r} names slots that are not numbers; write it as worker-1:0,2") from None


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """Slots of each host of ``worker-0@worker-1:0,2``, sorted.

    Raises:
        UsageError: a slot is not a number.
    """
    found: dict[str, set[int]] = {}
    for part in node_config_list.split("@"):
        host, slots = parse_node_config(part)
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """The slots that take part, by host, in the order of `host_info`; {} where nothing is left.

    Raises:
        UsageError: both strings are given, or a host or slot is not in `host_info`.
    """
    if include_str and exclude_str:
        raise UsageError("include_str and exclude_str contradict each other; use one of them")
    text = include_str or exclude_str
    if not text:
        return {host: list(slots) for host, slots in host_info.items()}
    named = parse_node_config_list(text)
    for host, slots in named.items():
        if host not in host_info:
            known = ", ".join(list(host_info)[:8])
            raise UsageError(f"{text!r}: host {host!r} is not in the hostfile, which has {known or 'none'}")
        missing = sorted(set(slots).difference(host_info[host]))
        if missing:
            raise UsageError(f"{text!r}: host {host} has no slot {missing[0]}; it has {list(host_info[host])}")
    found = {}
    for host, given in host_info.items():
        own = list(dict.fromkeys(given))
        chosen = (named[host] or own) if host in named else []
        found[host] = chosen if include_str else [slot for slot in own if slot not in chosen]
    return {host: slots for host, slots in found.items() if slots}


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """parse_resource_filter for numbers of slots.

    Raises:
        UsageError: as parse_resource_filter.
    """
    return parse_resource_filter({host: range(count) for host, count in resource_pool.items()}, inclusion, exclusion)


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, Sequence[int]], num_nodes: int, num_gpus: int
) -> dict[str, list[int]]:
    """The first `num_nodes` hosts, each with slots 0 to `num_gpus` - 1; without a positive number, all."""
    hosts = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return {host: list(range(num_gpus)) if num_gpus > 0 else list(active_resources[host]) for host in hosts}


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Hosts and slots as one word: base64 of JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


if __name__ == "__main__":
    main()

cover(globals())
