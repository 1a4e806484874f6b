# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run` on the hosts of a test cluster, for the tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.append(str(REPOSITORY / "tools"))

import test_cluster  # noqa: E402

ALL_REDUCE = Path(__file__).parent / "all_reduce.py"
WAIT = Path(__file__).parent / "wait.py"

# Launcher: its program, and how to get it.
PROGRAMS = {
    "ssh": ("ssh", "apt install openssh-client"),
    "pdsh": ("pdsh", "apt install pdsh"),
    "openmpi": ("mpirun.openmpi", "apt install openmpi-bin"),
    "mpich": ("mpiexec.mpich", "apt install mpich"),
    "impi": ("mpiexec.hydra", "tools/install_test_tools.sh brings it from PyPI (impi-rt), for x86-64"),
    "slurm": ("srun", "apt install slurmctld slurmd slurm-client munge"),
}
LAUNCHERS = tuple(PROGRAMS)


def _impi_folder() -> Path | None:
    """Where tools/install_test_tools.sh put Intel MPI."""
    for folder in (os.environ.get("IMPI_FOLDER"), Path(sys.prefix) / "impi", REPOSITORY / ".venv" / "impi"):
        if folder and (Path(folder) / "bin" / "mpiexec.hydra").exists():
            return Path(folder).resolve()
    return None


class Hosts:
    """The cluster, and `anyaccel run` on its first host."""

    def __init__(self, cluster: test_cluster.Cluster, slurm_is_missing: str | None) -> None:
        self.cluster = cluster
        self.slurm_is_missing = slurm_is_missing
        self._child: subprocess.Popen[str] | None = None  # the last that was started

    def __getitem__(self, index: int) -> test_cluster.Host:
        return self.cluster[index]

    def need(self, launcher: str) -> None:
        """Skip the test where `launcher` is not there."""
        program, remedy = PROGRAMS[launcher]
        if launcher == "impi":
            found = _impi_folder() is not None
        else:
            found = test_cluster.which(program) is not None
        if not found:
            pytest.skip(f"no {program}: {remedy}")
        if launcher == "slurm" and self.slurm_is_missing:
            pytest.skip(self.slurm_is_missing)

    def environment(self, launcher: str, **variables: str) -> dict[str, str]:
        """What a user of `launcher` has in the environment."""
        found = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        folder = _impi_folder()
        if launcher == "impi" and folder:
            found["PATH"] = f"{folder / 'bin'}{os.pathsep}{found['PATH']}"
        return found | variables

    def command(self, launcher: str, hostfile: Path, arguments: Sequence[object]) -> list[str]:
        """`anyaccel run` over the hosts of a hostfile; with "", as it is without --launcher."""
        self.need(launcher or "ssh")
        run = [sys.executable, "-m", "anyaccel", "run", "--hostfile", hostfile]
        return [str(word) for word in (*run, *(["--launcher", launcher] if launcher else []), *arguments)]

    def start(
        self, launcher: str, hostfile: Path, *arguments: object, variables: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start `anyaccel run` on the first host; its output is captured as text."""
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": hostfile.parent,
        } | options
        environment = self.environment(launcher, **(variables or {}))
        child: subprocess.Popen[str] = self[0].popen(
            self.command(launcher, hostfile, arguments), text=True, env=environment, **options
        )
        self._child = child
        return child

    def run(
        self, launcher: str, hostfile: Path, *arguments: object, timeout: float = 90, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `anyaccel run` on the first host to its end."""
        with self.start(launcher, hostfile, *arguments, **options) as child:
            try:
                output, errors = child.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as late:
                child.kill()
                output, errors = child.communicate()
                raise AssertionError(f"not done after {timeout} s\n{output}\n{errors}") from late
        return subprocess.CompletedProcess(child.args, child.returncode, output, errors)

    def hostfile(self, folder: Path, slots: int | Sequence[int] = 1, hosts: int = 2) -> Path:
        """A hostfile with the first hosts."""
        path = folder / "hosts"
        path.write_text(self.cluster.hostfile(slots, hosts))
        return path

    def wait_started(self, folder: Path, ranks: int, seconds: float = 60) -> None:
        """Wait until all ranks of wait.py run."""
        deadline = time.monotonic() + seconds
        while len([path for path in folder.glob("rank?") if path.suffix == ""]) < ranks:
            if time.monotonic() > deadline or (self._child and self._child.poll() is not None):
                assert self._child
                self._child.terminate()
                raise AssertionError(f"not all of {ranks} ranks run; {self._child.communicate(timeout=30)}")
            time.sleep(0.01)
        time.sleep(0.1)  # they have seen each other too

    def wait_idle(self, seconds: float) -> dict[str, dict[int, str]]:
        """Wait until nothing of a job runs anywhere; what still does after `seconds`."""
        return self.cluster.wait_idle(seconds)


def lines(output: str) -> list[dict[str, Any]]:
    """What the ranks of all_reduce.py printed, by rank; a launcher's `node1: ` or `[rank0]` in front is cut."""
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"rank"' in line]
    return sorted(found, key=lambda line: line["rank"])
