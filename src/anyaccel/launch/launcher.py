# SPDX-License-Identifier: Apache-2.0
"""The launcher of one machine: asks the machine, makes the plan, starts and supervises the workers."""

# Importing pathlib takes 8 ms of each launch.
# ruff: noqa: PTH109, PTH110, PTH116, PTH208

from __future__ import annotations

import _socket  # socket.py brings selectors and enums that a launch has no use for: 6 ms
import os
import stat
from collections.abc import Callable, Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.launch.options import DEFAULT_GRACE_PERIOD, LaunchOptions
from anyaccel.launch.plan import LaunchPlan, RankBinding, build_plan
from anyaccel.launch.runners import local
from anyaccel.launch.supervise import supervise
from anyaccel.launch.worker import Worker
from anyaccel.topology import Machine, read_machine

_CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
_ROCM_DEVICES = "HIP_VISIBLE_DEVICES"


def count_devices(machine: Machine, environ: Mapping[str, str], root: str = "") -> int:
    """How many devices this machine has for workers, without importing torch or a vendor library.

    DS_ACCELERATOR names the accelerator; without it, one that has devices here is taken, else the CPU. Devices
    are those that the kernel shows, at most as many as the visible-devices variable lists; for an accelerator
    that was asked for by name that list alone counts. The CPU has one device per NUMA node with allowed cores.

    Args:
        root: where `dev/` and `sys/` are; tests give a tree of their own.

    Raises:
        UsageError: DS_ACCELERATOR names one whose devices cannot be counted like this, or that has none.
    """
    # Not through anyaccel.env, whose import takes 15 ms of each launch.
    asked = environ.get("DS_ACCELERATOR", "")
    counters: dict[str, Callable[[], int]] = {
        "cuda": lambda: _gpus(environ, root, forced=bool(asked)),
        "cpu": lambda: len(machine.nodes_with_cores()),
    }
    if not asked:
        return next(filter(None, (count() for count in counters.values())), 1)
    if asked not in counters:
        raise UsageError(f"DS_ACCELERATOR={asked!r}: cannot count its devices; give --num_accelerators")
    count = counters[asked]()
    if not count:
        check = f"check {_CUDA_DEVICES} and {_ROCM_DEVICES}, or give --num_accelerators"
        raise UsageError(f"DS_ACCELERATOR={asked!r}: no device visible; {check}")
    return count


def _gpus(environ: Mapping[str, str], root: str, *, forced: bool) -> int:
    """NVIDIA's GPUs, else AMD's, whose torch goes by the same name."""
    variables = [_CUDA_DEVICES]
    there = _nvidia_devices(root)
    if not there:
        there = _amd_devices(root)
        variables.insert(0, _ROCM_DEVICES)  # on ROCm it wins over the other, which also counts
    listed = next((_visible(environ[name]) for name in variables if name in environ), None)
    if listed is None:
        return there
    # The variable may be a stray one, of a login shell that is used on nodes with and without devices.
    return listed if forced else min(listed, there)


def _visible(devices: str) -> int:
    """Devices in a list such as "0,3"; as in CUDA, those after a negative or empty entry do not count."""
    count = 0
    for device in devices.split(","):
        if not device.strip() or device.strip().startswith("-"):
            break
        count += 1
    return count


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _nvidia_devices(root: str) -> int:
    return sum(name.startswith("nvidia") and name[6:].isdigit() for name in _names(f"{root}/dev"))


def _amd_devices(root: str) -> int:
    """Nodes of the compute driver that are GPUs: a CPU has gpu_id 0, a GPU kept from a container cannot be read."""
    if not os.path.exists(f"{root}/dev/kfd"):
        return 0
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    found = 0
    for node in _names(nodes):
        try:
            with open(f"{nodes}/{node}/gpu_id") as file:
                found += file.read().strip() not in ("", "0")
        except OSError:
            continue
    return found


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


def make_plan(
    options: LaunchOptions,
    machine: Machine | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """The plan for `options` on this machine. Starts nothing.

    Args:
        machine: what to plan for; read from this machine when left out.
        environ: the environment that the workers will inherit; `os.environ` when left out.
        extra_env: more variables for every worker. Those of the plan itself win.

    Raises:
        UsageError: what is asked for cannot be had on this machine.
    """
    machine = machine or read_machine()
    environ = os.environ if environ is None else environ
    return build_plan(
        options,
        machine,
        devices=1 if options.num_accelerators else count_devices(machine, environ),
        master_port=free_port(options.master_port),
        environ=environ,
        extra_env=extra_env,
    )


def launch_local(
    plan: LaunchPlan,
    command: Sequence[str] | Callable[[RankBinding], Sequence[str]],
    *,
    grace_period: float = DEFAULT_GRACE_PERIOD,
) -> int:
    """Start one worker per rank of `plan`, wait for all, and return the exit code of the job.

    Call it from the main thread, before starting others: it forks, and handles SIGINT and SIGTERM.

    Args:
        command: argument vector of the workers, or a function that gives it for a rank.
        grace_period: seconds between asking workers to end and killing them.

    Returns:
        0 when all workers returned 0, else the exit code of the first one that failed, 128 + N when signal N
        killed it or ended the launcher. Nothing that a worker started is alive then.
    """
    workers = []
    for binding in plan.ranks:
        argv = command(binding) if callable(command) else command
        workers.append(Worker(binding, tuple(argv), {**os.environ, **binding.env}))
    return supervise(workers, grace_period)


def check_script(options: LaunchOptions, search_path: str) -> None:
    """Raise UsageError where the script is not there; what a module name means is left to Python."""
    script = options.script
    if options.module:
        return
    if not options.no_python:
        if not os.path.exists(script):
            raise UsageError(f"script {script!r} does not exist in {os.getcwd()!r}; check the path")
        return
    folders = search_path.split(os.pathsep)
    names = [script] if "/" in script else [f"{folder or '.'}/{script}" for folder in folders]
    if not any(_is_program(name) for name in names):
        where = "is not an executable file" if "/" in script else "is not a program in PATH"
        raise UsageError(f"{script!r} {where}; leave --no_python out to run it with Python")


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
    plan = make_plan(options, extra_env=extra_env)
    return launch_local(plan, lambda binding: local.build_command(options, binding), grace_period=options.grace_period)
