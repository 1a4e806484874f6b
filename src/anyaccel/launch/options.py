# SPDX-License-Identifier: Apache-2.0
"""What the user asked the launcher for. Flags are parsed once, into this; everything after works on it."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.topology import parse_cpu_list

# Everything is to be gone 5 s after a failure; the rest of the time is for what the workers leave behind.
DEFAULT_GRACE_PERIOD = 3.0


@dataclass(frozen=True)
class LaunchOptions:
    """Options of one launch.

    Attributes:
        script: path of a Python script; a module name with `module`; a program with `no_python`.
        script_args: its arguments, passed on untouched.
        num_accelerators: number of workers; None for one per device.
        bind_cores: bind each worker to its own cores; a core list implies it.
        core_list: logical CPUs to divide among the workers, in this order; None for all allowed cores.
        master_addr: address of rank 0; None for 127.0.0.1.
        master_port: TCP port of rank 0; None for a free one.
        module: run the script as `python -m` does.
        no_python: run the script as a program of its own.
        local_rank_argument: pass `--local_rank=N` to the script, as `deepspeed` does.
        grace_period: seconds between asking workers to end and killing them.

    Raises:
        UsageError: a value that cannot be right on any machine.
    """

    script: str
    script_args: tuple[str, ...] = ()
    num_accelerators: int | None = None
    bind_cores: bool = False
    core_list: tuple[int, ...] | None = None
    master_addr: str | None = None
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    local_rank_argument: bool = True
    grace_period: float = DEFAULT_GRACE_PERIOD

    def __post_init__(self) -> None:
        if not self.script:
            raise UsageError("no script was given; put it after the options, as in: anyaccel run [options] train.py")
        if self.num_accelerators is not None and self.num_accelerators < 1:
            raise UsageError(f"--num_accelerators is {self.num_accelerators}, it must be at least 1")
        if self.master_addr is not None and not self.master_addr.strip():
            raise UsageError("--master_addr is empty; give an address or leave it out")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise UsageError(f"--master_port is {self.master_port}, a TCP port is between 1 and 65535")
        if self.module and self.no_python:
            raise UsageError("--module and --no_python contradict each other; use one of them")
        # `not >=` refuses NaN as well.
        if not self.grace_period >= 0 or self.grace_period == float("inf"):
            raise UsageError(f"--grace-period is {self.grace_period}, it must be 0 or more seconds")
        if self.core_list is not None:
            if not self.core_list:
                raise UsageError("--bind_core_list is empty; give CPUs such as 0-27,32-59 or leave it out")
            repeated = sorted({core for core in self.core_list if self.core_list.count(core) > 1})
            if repeated:
                raise UsageError(f"--bind_core_list names CPU {repeated[0]} more than once; name each once")
            object.__setattr__(self, "bind_cores", True)


def parse_core_list(text: str) -> tuple[int, ...]:
    """The CPUs of a `--bind_core_list` such as ``0-27,32-59``, in the order given.

    Raises:
        UsageError: the text is no such list.
    """
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise UsageError(f"--bind_core_list {text!r}: {error}; write it as 0-27,32-59") from None
