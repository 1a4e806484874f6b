# SPDX-License-Identifier: Apache-2.0
"""deepspeed.launcher.multinode_runner: the command lines of MPI and Slurm, from anyaccel's runners.

They start the script once a rank; it takes its rank from the launcher's variables, as
`deepspeed.init_distributed(auto_mpi_discovery=True)` does. `anyaccel run --launcher ...` also binds, forwards variables
and supervises.
"""

from __future__ import annotations

import abc
import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.launch.runners import find_runner, require_program

from .._cover import cover

__all__ = ["IMPIRunner", "MPICHRunner", "MVAPICHRunner", "MultiNodeRunner", "OpenMPIRunner", "SlurmRunner"]


class MultiNodeRunner(abc.ABC):
    """Base of the runners.

    Args:
        args: options as `runner.parse_args` returns them.
        world_info_base64: kept; hosts and slots are an argument of `get_cmd`.
    """

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}
        self.validate_args()

    @abc.abstractmethod
    def backend_exists(self) -> bool:
        """Whether the launcher is installed."""

    @abc.abstractmethod
    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, Sequence[int]]) -> list[str]:
        """The launcher's command line."""

    def add_export(self, key: str, var: str) -> None:
        """A variable that every rank gets."""
        self.exports[key.strip()] = var.strip()

    def parse_user_args(self) -> list[str]:
        """The script's arguments."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """The launcher's name."""
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027 - to be overridden
        """Nothing: what a launcher cannot do, its command line refuses."""


class _Runner(MultiNodeRunner):
    NAME = ""

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

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, Sequence[int]]) -> list[str]:
        """The launcher's command line.

        Args:
            environment: where variables are looked up that `add_export` has not been told.
            active_resources: slots that take part, by host.

        Raises:
            UsageError: the launcher cannot start such a job.
        """
        python = [] if self.args.no_python else [sys.executable, "-u", *(["-m"] if self.args.module else [])]
        job = ClusterJob(
            hosts=tuple(Host(host, tuple(slots)) for host, slots in active_resources.items()),
            program=(*python, self.user_script, *self.user_arguments),
            environment=self.exports,
            launcher_args=tuple(shlex.split(self.args.launcher_args)),
            ssh_port=self.args.ssh_port,
            folder=environment.get("PWD", os.curdir),
        )
        return find_runner(self.NAME).build_command(job)


class OpenMPIRunner(_Runner):
    """Open MPI."""

    NAME = "openmpi"


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


cover(globals())
