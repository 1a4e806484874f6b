# SPDX-License-Identifier: Apache-2.0
"""The launcher of one machine: asks the machine, makes the plan, starts and supervises the workers."""

# Importing pathlib takes 8 ms of each launch.
# ruff: noqa: PTH109, PTH110, PTH116

from __future__ import annotations

import _socket  # socket.py brings selectors and enums that a launch has no use for: 6 ms
import os
import stat
from collections.abc import Callable, Mapping, Sequence

from anyaccel.errors import ProgramNotFoundError, ProgramNotRunnableError, UsageError
from anyaccel.launch.command import worker_command
from anyaccel.launch.counts import brief
from anyaccel.launch.options import DEFAULT_GRACE_PERIOD, LaunchOptions
from anyaccel.launch.output import LEVELS, WARNING, Output, OutputOptions
from anyaccel.launch.plan import LaunchPlan, Place, RankBinding
from anyaccel.launch.planning import plan_here
from anyaccel.launch.streams import prepare_log_dir
from anyaccel.launch.supervise import supervise
from anyaccel.launch.worker import Worker
from anyaccel.topology import Machine, read_machine


def free_port(wanted: int | None = None) -> int:
    """A TCP port that nobody listens on: `wanted`, or one that the kernel picks.

    The port is bound on all addresses, as rank 0 will do it, but never listened on.

    Raises:
        UsageError: `wanted` is in use, or not allowed.
    """
    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    try:
        # Connections of an earlier job that wait for their time-out do not hinder the next listener.
        probe.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted or 0))
        port: int = probe.getsockname()[1]
    except OSError as error:
        raise UsageError(
            f"--master_port {wanted} cannot be used: {error.strerror}; choose another, or leave it out"
        ) from None
    finally:
        probe.close()
    return port


def check_address(address: str) -> None:
    """Raise UsageError where no name service here knows `address`: workers would wait for rank 0 for minutes."""
    try:
        _socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"--master_addr {brief(address)} leads to no address on {os.uname().nodename}: {why}; "
            "give the address of rank 0's host, or a name of it that every host knows"
        ) from None


def make_plan(
    options: LaunchOptions,
    machine: Machine | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    extra_env: Mapping[str, str] | None = None,
    place: Place | None = None,
    device_ids: Sequence[int] | None = None,
    all_device_ids: Sequence[int] | None = None,
) -> LaunchPlan:
    """The plan for `options` on this machine. Starts nothing.

    Args:
        machine: what to plan for; read from this machine when left out.
        environ: the environment that the workers will inherit; `os.environ` when left out.
        extra_env: more variables for every worker. Those of the plan itself win.
        place: where the ranks of this machine stand in the whole job; when left out, they are all.
        device_ids: the devices of this machine that take part; when left out, the first ones.
        all_device_ids: those of all workers of this machine, where the job has it under several names.

    Raises:
        UsageError: what is asked for cannot be had on this machine.
    """
    machine = machine or read_machine()
    environ = os.environ if environ is None else environ
    if options.master_addr is not None:
        check_address(options.master_addr)
    return plan_here(
        options,
        machine,
        # On one of several hosts whoever leads the job has asked for it.
        master_port=free_port(options.master_port) if place is None else options.master_port or 0,
        environ=environ,
        extra_env=extra_env,
        place=place,
        device_ids=device_ids,
        all_device_ids=all_device_ids,
    )


def launch_local(
    plan: LaunchPlan,
    command: Sequence[str] | Callable[[RankBinding], Sequence[str]],
    *,
    grace_period: float = DEFAULT_GRACE_PERIOD,
    output: OutputOptions | None = None,
) -> int:
    """Start one worker per rank of `plan`, wait for all, and return the exit code of the job.

    Call it from the main thread, before starting others: it forks, and handles SIGINT and SIGTERM.

    Args:
        command: argument vector of the workers, or a function that gives it for a rank.
        grace_period: seconds between asking workers to end and killing them.
        output: where the workers' output goes; to that of this process when left out.

    Returns:
        0 when all workers returned 0, else the exit code of the first one that failed, 128 + N when signal N
        killed it or ended the launcher. Nothing that a worker started is alive then.
    """
    workers = []
    for binding in plan.ranks:
        argv = command(binding) if callable(command) else command
        workers.append(Worker(binding, tuple(argv), {**os.environ, **binding.env}))
    return supervise(workers, grace_period, options=output)


def current_folder() -> str:
    """The current folder.

    Raises:
        UsageError: it has been deleted.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current folder is not there any more ({error.strerror}); cd to one that is, or to the same path again"
        ) from None


def check_script(options: LaunchOptions, search_path: str) -> None:
    """Raise UsageError where the script is not there; what a module name means is left to Python.

    Of a program it is ProgramNotFoundError or ProgramNotRunnableError, with a shell's exit code for that.
    """
    script = options.script
    if options.module:
        return
    if not options.no_python:
        if not os.path.exists(script):
            raise UsageError(f"script {script!r} does not exist in {current_folder()!r}; check the path")
        return
    folders = search_path.split(os.pathsep)
    names = [script] if "/" in script else [f"{folder or '.'}/{script}" for folder in folders]
    if any(_is_program(name) for name in names):
        return
    if "/" not in script:
        raise ProgramNotFoundError(f"{script!r} is not a program in PATH; leave --no_python out to run it with Python")
    if not os.path.exists(script):
        raise ProgramNotFoundError(f"program {script!r} does not exist in {os.getcwd()!r}; check the path")
    raise ProgramNotRunnableError(f"{script!r} is not an executable file; leave --no_python out to run it with Python")


def _is_program(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
    except OSError:
        return False


def run(options: LaunchOptions, *, extra_env: Mapping[str, str] | None = None) -> int:
    """Plan, start and supervise; returns the exit code of the job as `launch_local` does.

    Raises:
        UsageError: what is asked for cannot be had on this machine; nothing was started.
    """
    check_script(options, os.environ.get("PATH", os.defpath))
    prepare_log_dir(options)
    plan = make_plan(options, extra_env=extra_env)
    say_warnings(plan, options)
    return launch_local(
        plan,
        lambda binding: worker_command(options, binding),
        grace_period=options.grace_period,
        output=options,
    )


def say_warnings(plan: LaunchPlan, options: OutputOptions, name: str = "anyaccel") -> None:
    """Say what a plan did otherwise than asked, on standard error.

    Args:
        name: what each line begins with.
    """
    if not plan.warnings:
        return  # standard error may even be closed
    output = Output(2, LEVELS[options.log_level], name)
    for warning in plan.warnings:
        output.line(f"warning: {warning}", WARNING)
    output.close(None)
