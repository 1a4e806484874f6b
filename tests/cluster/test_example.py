# SPDX-License-Identifier: Apache-2.0
"""examples/mpi_job.py and the command `deepspeed` on several hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster_hosts import REPOSITORY, Hosts

from anyaccel import compat

EXAMPLE = REPOSITORY / "examples" / "mpi_job.py"


@pytest.mark.parametrize(
    "launcher", ["openmpi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpich", "impi"))]
)
def test_pi_by_two_hosts(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    """`anyaccel run --hostfile hosts --launcher openmpi --bind_cores_to_rank examples/mpi_job.py`"""
    names = [hosts[index].name for index in range(2)]
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
    child = hosts.start(launcher, hostfile, "--bind_cores_to_rank", "--no_local_rank", EXAMPLE)
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    where = dict(re.findall(r"rank (\d) of 2 on (\S+), cores \[\d", out))
    assert where == {"0": names[0], "1": names[1]}
    assert re.search(r"pi is about 3\.1[34]\d", out)  # mpirun may put the end of another rank's line beside it


def test_the_setup_guides_hostfile_line(hosts: Hosts, tmp_path: Path) -> None:
    """`deepspeed --hostfile=<hostfile> --bind_cores_to_rank --launcher impi --master_addr <master-ip> <script>`"""
    hosts.need("impi")
    names = [hosts[index].name for index in range(2)]
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
    (tmp_path / "script.py").write_text(
        "import deepspeed, os, socket\n"
        "deepspeed.init_distributed()\n"
        "rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()\n"
        "os.write(1, f'rank {rank} {world_size} {socket.gethostname()}\\n'.encode())\n"  # one piece: mpirun mixes
    )
    script = "import sys; from deepspeed.launcher.runner import main; sys.exit(main())"
    environment = hosts.environment("impi")
    environment |= compat.job_environment(environment)
    child = hosts[0].popen(
        [
            *hosts.command("impi", tmp_path / "hostfile", [])[:1], "-c", script, "--hostfile=hostfile",
            "--bind_cores_to_rank", "--launcher", "impi", "--master_addr", hosts[0].address, "script.py",
        ],
        text=True, env=environment, cwd=tmp_path, stdout=-1, stderr=-1,
    )  # fmt: skip
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    assert sorted(out.split("\n"))[1:] == [f"rank 0 2 {names[0]}", f"rank 1 2 {names[1]}"]
