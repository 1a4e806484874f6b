# SPDX-License-Identifier: Apache-2.0
"""The launcher on one machine: plans, starts and supervises the workers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence

from anyaccel.errors import ProgramNotFoundError, ProgramNotRunnableError, UsageError
from anyaccel.launch.local.command import worker_command
from anyaccel.launch.local.streams import prepare_log_dir
from anyaccel.launch.local.supervise import supervise
from anyaccel.launch.local.worker import Worker
from anyaccel.launch.output import LEVELS, WARNING, Output, OutputOptions
from anyaccel.launch.plan.options import DEFAULT_GRACE_PERIOD, LaunchOptions
from anyaccel.launch.plan.plan import LaunchPlan, RankBinding
from anyaccel.launch.plan.planning import make_plan


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
    """Check that the script exists; a module's name is left to Python.

    Raises:
        UsageError: there is no such script.
        ProgramNotFoundError, ProgramNotRunnableError: the same for a program, with a shell's exit code.
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
    """Print the warnings of a plan on standard error; each line begins with `name`."""
    if not plan.warnings:
        return  # standard error may even be closed
    output = Output(2, LEVELS[options.log_level], name)
    for warning in plan.warnings:
        output.line(f"warning: {warning}", WARNING)
    output.close(None)
