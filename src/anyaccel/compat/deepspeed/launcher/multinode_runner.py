# SPDX-License-Identifier: Apache-2.0
"""deepspeed.launcher.multinode_runner: the command lines of MPI and Slurm, from anyaccel's runners.

They start the script once a rank; it takes its rank from the launcher's variables, as
`deepspeed.init_distributed(auto_mpi_discovery=True)` does. `anyaccel run --launcher ...` also forwards variables and
supervises.
"""

from __future__ import annotations

import abc
import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from anyaccel.errors import UsageError
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.launch.runners import find_runner, require_program, unless_given

from .._cover import cover

# Slots of each host: their numbers, or how many.
Resources = Mapping[str, "Sequence[int] | int"]

__all__ = ["IMPIRunner", "MPICHRunner", "MVAPICHRunner", "MultiNodeRunner", "OpenMPIRunner", "SlurmRunner"]


class MultiNodeRunner(abc.ABC):
    """Base of the runners.

    Args:
        args: options as `runner.parse_args` returns them.
        world_info_base64: kept; hosts and slots are an argument of `get_cmd`.
    """

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}  # quoted for a shell
        self._values: dict[str, str] = {}  # as they are

    @abc.abstractmethod
    def backend_exists(self) -> bool:
        """Whether the launcher is installed."""

    @abc.abstractmethod
    def get_cmd(self, environment: Mapping[str, str], active_resources: Resources) -> list[str]:
        """The launcher's command line."""

    def add_export(self, key: str, var: str) -> None:
        """A variable that every rank gets; in `exports` its value is as a shell takes it."""
        key, var = key.strip(), var.strip()
        self._values[key] = var
        self.exports[key] = _quoted(var)

    def parse_user_args(self) -> list[str]:
        """The script's arguments."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """The launcher's name."""
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027 - to be overridden
        """Nothing: what a launcher cannot do, its command line refuses."""

    @classmethod  # noqa: B027 - to be overridden
    def validate_active_resources(cls, active_resources: Resources) -> None:
        """Nothing, for most launchers.

        Raises:
            UsageError: the launcher cannot start a job on these slots.
        """


class _Runner(MultiNodeRunner):
    NAME = ""
    FOLDER: tuple[str, ...] = ("wdir",)  # its options for the working directory of the ranks; the first one is given

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    @property
    def name(self) -> str:
        """What --launcher calls it."""
        return self.NAME

    def backend_exists(self) -> bool:
        """Whether its program is in PATH."""
        try:
            require_program(find_runner(self.NAME), os.environ.get("PATH", os.defpath))
        except UsageError:
            return False
        return True

    def get_cmd(self, environment: Mapping[str, str], active_resources: Resources) -> list[str]:
        """The launcher's command line.

        Args:
            environment: of the launcher: PWD is the folder of the job; where it can be changed it gets the variables of
                `add_export`, which most launchers take from there.
            active_resources: slots that take part, by host: their numbers, or how many.

        Raises:
            UsageError: the launcher cannot start such a job.
        """
        hosts = _slots(active_resources)
        self.validate_active_resources(hosts)
        _check_first_slots(self.name, hosts)
        folder = environment.get("PWD") or str(Path.cwd())
        python = [] if self.args.no_python else [sys.executable, "-u", *(["-m"] if self.args.module else [])]
        job = ClusterJob(
            hosts=tuple(Host(host, tuple(slots)) for host, slots in hosts.items()),
            program=(*self._binder(), *python, self.user_script, *self.user_arguments),
            environment={key: self._values.get(key, value) for key, value in self.exports.items()},
            launcher_args=self._launcher_arguments(folder),
            ssh_port=self.args.ssh_port,
            folder=folder,
        )
        runner = find_runner(self.NAME)
        if isinstance(environment, MutableMapping):
            environment.update(runner.launcher_environment(job, environment))
        return runner.build_command(job)

    def _launcher_arguments(self, folder: str) -> tuple[str, ...]:
        """The user's, and the folder: without it ranks start in "/", where `anyaccel run` starts its agents."""
        given = shlex.split(self.args.launcher_args)
        return (*given, *unless_given(given, self.FOLDER, f"-{self.FOLDER[0]}", folder))

    def _binder(self) -> list[str]:
        """What gives each rank its cores where --bind_cores_to_rank is given; DeepSpeed starts numactl for that."""
        if not (self.args.bind_cores_to_rank or self.args.bind_core_list):
            return []
        cores = [f"--bind_core_list={self.args.bind_core_list}"] if self.args.bind_core_list else []
        return [sys.executable, "-m", "anyaccel", "bind", *cores, "--"]


def _quoted(value: str) -> str:
    if not re.search(r"[^\w@%+=:,./-]", value):
        return value
    escaped = re.sub(r'([\\"$`])', r"\\\1", value)
    return f'"{escaped}"'


def _slots(resources: Resources) -> dict[str, list[int]]:
    return {host: list(range(slots) if isinstance(slots, int) else slots) for host, slots in resources.items()}


def _check_first_slots(name: str, hosts: Mapping[str, Sequence[int]]) -> None:
    """A rank learns its number on its host from the launcher, which knows nothing of slots: those begin at 0."""
    for host, slots in hosts.items():
        if list(slots) != list(range(len(slots))):
            raise UsageError(
                f"launcher {name} cannot select specific device ids, such as {list(slots)} on {host}; take the first "
                "slots of each host, or use `anyaccel run --include`"
            )


class OpenMPIRunner(_Runner):
    """Open MPI."""

    NAME = "openmpi"
    FOLDER = ("-wdir", "wdir", "wd")


class MPICHRunner(_Runner):
    """MPICH."""

    NAME = "mpich"


class IMPIRunner(_Runner):
    """Intel MPI."""

    NAME = "impi"


class MVAPICHRunner(_Runner):
    """MVAPICH."""

    NAME = "mvapich"


class SlurmRunner(_Runner):
    """Slurm."""

    NAME = "slurm"
    FOLDER = ("-chdir", "chdir", "D")

    @classmethod
    def validate_active_resources(cls, active_resources: Resources) -> None:
        """Ranks of Slurm have no slots of their own.

        Raises:
            UsageError: slots are chosen by number, or hosts have different numbers of them.
        """
        hosts = _slots(active_resources)
        _check_first_slots("slurm", hosts)
        counts = {host: len(slots) for host, slots in hosts.items()}
        if len(set(counts.values())) > 1:
            raise UsageError(f"launcher slurm needs the same slot count on every host, got {counts}")


cover(globals())
