# SPDX-License-Identifier: Apache-2.0
"""A job on several hosts as data, from which a runner builds a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Host:
    """One host of a job.

    Attributes:
        name: as the hostfile has it: what ssh and mpirun are given.
        slots: numbers of the slots that take part, ascending; one worker each.
    """

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class ClusterJob:
    """What is started by a launcher of several hosts.

    Attributes:
        hosts: in the order of their ranks.
        program: argument vector that is started once per host (`pdsh`) or once per rank (MPI, Slurm). Its words may
            be anything: a launcher that gives them to a shell quotes them. With `pdsh`, the word ``%n`` in it stands
            for the number of the host.
        environment: variables that the start of `program` depends on, and the contact that it calls back; all others
            come to the workers by that call.
        launcher_args: extra arguments for the launcher, before the program.
        ssh_port: TCP port of sshd on all hosts; None for what ssh itself uses.
        folder: working directory of the workers.
        verbose: let the launcher say what it does.
    """

    hosts: tuple[Host, ...]
    program: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    folder: str = "."
    verbose: bool = False

    @property
    def world_size(self) -> int:
        """Number of workers on all hosts."""
        return sum(len(host.slots) for host in self.hosts)
