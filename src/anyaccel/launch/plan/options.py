# SPDX-License-Identifier: Apache-2.0
"""The launcher's options. Flags are parsed once, into these dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.errors import UsageError
from anyaccel.launch.counts import MOST_ON_A_HOST, shorten
from anyaccel.launch.host_name import is_host
from anyaccel.launch.output import OutputOptions
from anyaccel.topology import format_cpu_list, parse_cpu_list

# Everything must have ended 5 s after a failure; the rest of that time is for processes that workers leave behind.
DEFAULT_GRACE_PERIOD = 3.0
_LONGEST_GRACE_PERIOD = 31_536_000

# The hostfile that some clusters provide, as for `deepspeed`; it may be missing.
DEFAULT_HOSTFILE = "/job/hostfile"

MEMORY_POLICIES = ("auto", "bind", "preferred", "interleave", "none")
ALLOCATORS = ("default", "tcmalloc", "jemalloc")


@dataclass(frozen=True, kw_only=True)
class BindingOptions:
    """How each rank of a machine is bound.

    Attributes:
        bind_cores: bind each rank to its own cores; a core list implies it.
        core_list: logical CPUs to divide among the ranks, in this order; None for all allowed cores.
        smt: give a rank all allowed threads of each of its cores, not one.
        memory_policy: one of MEMORY_POLICIES.
        cores_reserved: so many cores at the end of each NUMA node are left to the system.
        malloc: allocator that is preloaded, one of ALLOCATORS.
        strict: what would be a warning about the binding is an error.

    Raises:
        UsageError: a value that cannot be right on any machine, or options that contradict each other.
    """

    bind_cores: bool = False
    core_list: tuple[int, ...] | None = None
    smt: bool = False
    memory_policy: str = "auto"
    cores_reserved: int = 0
    malloc: str = "default"
    strict: bool = False

    def __post_init__(self) -> None:
        if self.memory_policy not in MEMORY_POLICIES:
            raise UsageError(f"--mem-policy is {self.memory_policy!r}, it must be one of {', '.join(MEMORY_POLICIES)}")
        if self.malloc not in ALLOCATORS:
            raise UsageError(f"--malloc is {self.malloc!r}, it must be one of {', '.join(ALLOCATORS)}")
        if self.cores_reserved < 0:
            raise UsageError(f"--cores-reserved is {self.cores_reserved}, it must be 0 or more cores of each NUMA node")
        if self.core_list is not None:
            self._check_core_list(self.core_list)
            object.__setattr__(self, "bind_cores", True)
        elif not self.bind_cores:
            self._check_unbound()

    def arguments(self) -> list[str]:
        """These options as arguments of `anyaccel bind`, which reads them back (adr/0007)."""
        found = []
        if self.core_list is not None:
            found.append(f"--bind_core_list={format_cpu_list(self.core_list)}")
        if self.smt:
            found.append("--smt")
        if self.strict:
            found.append("--strict")
        return [
            *found,
            f"--mem-policy={self.memory_policy}",
            f"--cores-reserved={self.cores_reserved}",
            f"--malloc={self.malloc}",
        ]

    def _check_core_list(self, cores: tuple[int, ...]) -> None:
        if not cores:
            raise UsageError("--bind_core_list is empty; give CPUs such as 0-27,32-59 or leave it out")
        repeated = sorted({core for core in cores if cores.count(core) > 1})
        if repeated:
            raise UsageError(f"--bind_core_list names CPU {repeated[0]} more than once; name each once")
        if self.cores_reserved:
            raise UsageError(
                f"--cores-reserved {self.cores_reserved} and --bind_core_list contradict each other; "
                "leave the cores of the system out of the list"
            )
        if self.smt:
            raise UsageError(
                "--smt and --bind_core_list contradict each other; name the threads in the list, as in 0-3,64-67"
            )

    def _check_unbound(self) -> None:
        needless = {
            "--smt": self.smt,
            "--cores-reserved": self.cores_reserved,
            f"--mem-policy {self.memory_policy}": self.memory_policy in ("bind", "preferred"),
        }
        for option, given in needless.items():
            if given:
                raise UsageError(f"{option} is about workers that are bound to cores; add --bind_cores_to_rank")


@dataclass(frozen=True)
class LaunchOptions(BindingOptions, OutputOptions):
    """Options of one launch; those about binding and output are inherited and go by name.

    Attributes:
        script: path of a Python script; a module name with `module`; a program with `no_python`.
        script_args: its arguments, passed on untouched.
        num_accelerators: number of workers; None for one per device.
        master_addr: address of rank 0; None for 127.0.0.1.
        master_port: TCP port of rank 0; None for a free one.
        module: run the script as `python -m` does.
        no_python: run the script as a program of its own.
        local_rank_argument: pass `--local_rank=N` to the script, as `deepspeed` does.
        grace_period: seconds between asking workers to end and killing them.
        venv_script: file that a shell sources before each worker, such as bin/activate of a virtual environment;
            the workers' Python is then the `python` that it brings.
        max_restarts: how often torch.distributed.elastic starts all workers again after a failure; None for no elastic.
        elastic: smallest and largest number of hosts of an elastic job; None for those that there are.

    Raises:
        UsageError: a value that cannot be right on any machine.
    """

    script: str
    script_args: tuple[str, ...] = ()
    num_accelerators: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    local_rank_argument: bool = True
    grace_period: float = DEFAULT_GRACE_PERIOD
    venv_script: str | None = None
    max_restarts: int | None = None
    elastic: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.script:
            raise UsageError("no script was given; put it after the options, as in: anyaccel run [options] train.py")
        if self.num_accelerators is not None and self.num_accelerators < 1:
            raise UsageError(f"--num_accelerators is {self.num_accelerators}, it must be at least 1")
        if self.num_accelerators is not None and self.num_accelerators > MOST_ON_A_HOST:
            raise UsageError(
                f"--num_accelerators is {self.num_accelerators}, one host has at most {MOST_ON_A_HOST} workers; "
                "ask for fewer"
            )
        if self.master_addr is not None and not self.master_addr.strip():
            raise UsageError("--master_addr is empty; give an address or leave it out")
        if self.master_addr is not None and not is_host(self.master_addr):
            raise UsageError(
                f"--master_addr is {shorten(self.master_addr)}, it must be the name of a host or an address; "
                "a port goes into --master_port"
            )
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise UsageError(f"--master_port is {self.master_port}, a TCP port is between 1 and 65535")
        if self.module and self.no_python:
            raise UsageError("--module and --no_python contradict each other; use one of them")
        if not 0 <= self.grace_period <= _LONGEST_GRACE_PERIOD:  # refuses NaN as well
            raise UsageError(
                f"--grace-period is {self.grace_period:g}, it must be 0 to {_LONGEST_GRACE_PERIOD} seconds (a year)"
            )
        if self.max_restarts is not None and self.max_restarts < 0:
            raise UsageError(f"--max-restarts is {self.max_restarts}, it must be 0 or more")
        if self.elastic is not None and not 1 <= self.elastic[0] <= self.elastic[1]:
            least, most = self.elastic
            raise UsageError(f"--elastic is {least}:{most}, it must be MIN:MAX hosts with 1 <= MIN <= MAX")
        super().__post_init__()
        self.check_output()

    @property
    def is_elastic(self) -> bool:
        """Whether torch.distributed.elastic starts the workers."""
        return self.max_restarts is not None or self.elastic is not None


def parse_core_list(text: str) -> tuple[int, ...]:
    """The CPUs of a `--bind_core_list` such as ``0-27,32-59``, in the order given.

    Raises:
        UsageError: the text is no such list.
    """
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise UsageError(f"--bind_core_list {text!r}: {error}; write it as 0-27,32-59") from None


def parse_elastic(text: str) -> tuple[int, int]:
    """The two numbers of `--elastic MIN:MAX`; one number stands for both.

    Raises:
        UsageError: the text is no such range.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most if colon else least]
    if not all(number.isascii() and number.isdigit() and len(number) < 7 for number in numbers):
        raise UsageError(f"--elastic {text!r} is no range of hosts; write it as 2:4")
    return int(numbers[0]), int(numbers[1])
