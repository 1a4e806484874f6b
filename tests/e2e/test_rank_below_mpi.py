# SPDX-License-Identifier: Apache-2.0
"""init_distributed where an MPI has started the ranks, below a launcher that has set a RANK for itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOREIGN = ("OMPI_", "PMI", "MPI_", "SLURM_", "LOCAL_", "CROSS_", "RANK", "WORLD_", "MASTER_", "TORCHELASTIC")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SCRIPT = """
import os, sys
if sys.argv[1] == "alias":
    from anyaccel.compat.deepspeed import comm
else:
    from anyaccel import comm
import torch
before = comm.get_local_rank()
comm.init_distributed()
sum = torch.tensor([comm.get_rank() + 1])
comm.all_reduce(sum)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
line = [before, comm.get_local_rank(), comm.get_rank(), comm.get_world_size(), sum.item(), *map(os.environ.get, names)]
os.write(1, f"place {line}\\n".encode())
comm.destroy_process_group()
"""


def mpi(name: str) -> list[str]:
    """The start of a command for two ranks; skips where this MPI is not installed."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed: tools/install_test_tools.sh")
    options = ["--oversubscribe", "--bind-to", "none"] if "openmpi" in name else []
    return [program, *options, "-np", "2"]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return subprocess.run(
        [sys.executable, "-m", "anyaccel", "run", "--no_local_rank", "--no_python", *command],
        cwd=folder, env={**inherited, **ROOT}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("mpirun.openmpi", "anyaccel"),
        pytest.param("mpirun.openmpi", "alias", marks=pytest.mark.slow),
        pytest.param("mpiexec.mpich", "anyaccel", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_an_mpi_below_run_come_together(tmp_path: Path, program: str, name: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "--num_accelerators", "1", *mpi(program), sys.executable, "script.py", name)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("place"))
    assert lines == [f"place [{rank}, {rank}, {rank}, 2, 3, '{rank}', '2', '{rank}', '2']" for rank in (0, 1)]


@pytest.mark.slow
def test_two_mpi_jobs_with_one_port_are_refused(tmp_path: Path) -> None:
    code = (
        "from anyaccel import comm\n"
        "from anyaccel.errors import UsageError\n"
        "import os\n"
        "try: comm.init_distributed()\n"
        "except UsageError as error: os.write(1, f'said: {error}\\n'.encode())"
    )
    done = run(tmp_path, "--num_accelerators", "2", *mpi("mpirun.openmpi"), sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("belongs to a job of 2 workers, each of which may have started Open MPI: give each") == 4
