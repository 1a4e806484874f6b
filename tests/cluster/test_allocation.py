# SPDX-License-Identifier: Apache-2.0
"""Jobs inside of a Slurm allocation, and programs in folders whose names a shell would read otherwise."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from cluster_hosts import LAUNCHERS, WAIT, Hosts

SHOW = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
found = {name: os.environ.get(name) for name in names}
print(json.dumps({**found, "host": os.uname().nodename, "cores": sorted(os.sched_getaffinity(0))}), flush=True)
"""


def ranks(hosts: Hosts, folder: Path, *command: object) -> tuple[list[dict[str, object]], str]:
    """What show.py tells of its ranks, by rank, and what was said beside it."""
    hosts.need("slurm")
    (folder / "show.py").write_text(SHOW)
    done = hosts[0].run([str(word) for word in command], cwd=folder, env=hosts.environment("slurm"), timeout=90)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda rank: int(rank["RANK"])), done.stderr


def test_more_ranks_than_an_allocation_has_cpus(hosts: Hosts, tmp_path: Path) -> None:
    """`salloc -N2` gives one CPU a host: ranks share it, and a line says so."""
    run = [sys.executable, "-m", "anyaccel", "run", "--launcher", "slurm", "--num_accelerators", 2, "--no_local_rank"]
    found, said = ranks(hosts, tmp_path, "salloc", "-N2", *run, "show.py")
    assert [rank["host"] for rank in found] == ["node1", "node1", "node2", "node2"]
    assert {rank["WORLD_SIZE"] for rank in found} == {"4"}
    assert "anyaccel: warning: 2 ranks of a host share the 1 CPU that this allocation has there" in said
    _, said = ranks(hosts, tmp_path, "salloc", "-N2", "--ntasks-per-node=2", *run, "show.py")
    assert "warning" not in said


def test_the_binder_below_srun_below_run(hosts: Hosts, tmp_path: Path) -> None:
    """slurmstepd hands on what `anyaccel run` has set, and it is not below it: Slurm's own variables count."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    anyaccel = [sys.executable, "-m", "anyaccel"]
    run = [*anyaccel, "run", "--num_accelerators", 1, "--no_local_rank", "--no_python"]
    found, _ = ranks(
        hosts,
        tmp_path,
        *run,
        "srun",
        "-N1",
        "-n2",
        "--cpu-bind=none",
        *anyaccel,
        "bind",
        "--",
        sys.executable,
        "show.py",
    )
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert not set(found[0]["cores"]) & set(found[1]["cores"])  # type: ignore[call-overload]


@pytest.mark.slow
def test_the_batch_script_of_the_guide(hosts: Hosts, tmp_path: Path) -> None:
    """docs/slurm.md shows it; it is run here as `sbatch` runs it, on two hosts."""
    hosts.need("slurm")
    (tmp_path / "show.py").write_text(SHOW)
    script = Path(__file__).parents[2] / "examples" / "slurm.sbatch"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = hosts[0].run(
        ["sbatch", "--wait", "--nodes=2", "--output=job.out", str(script), "show.py"],
        cwd=tmp_path, env=hosts.environment("slurm") | {"PATH": path}, timeout=120,
    )  # fmt: skip
    said = (tmp_path / "job.out").read_text() if (tmp_path / "job.out").exists() else ""
    assert done.returncode == 0, done.stderr + said
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sorted((rank["host"], rank["RANK"]) for rank in found) == [
        ("node1", "0"), ("node1", "1"), ("node2", "2"), ("node2", "3")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "launcher", ["pdsh", *(pytest.param(n, marks=pytest.mark.slow) for n in LAUNCHERS if n != "pdsh")]
)
def test_an_interpreter_in_any_folder(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    """No shell on the way reads the name of the folder, and pdsh does not either."""
    odd = tmp_path / "sp ace$(touch PWNED);'%h%n"
    odd.symlink_to(sys.prefix)
    command = hosts.command(launcher, hosts.hostfile(tmp_path), [WAIT, tmp_path, "--end"])
    command[0] = str(odd / "bin" / "python")
    done = hosts[0].run(command, cwd=tmp_path, env=hosts.environment(launcher), timeout=90)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank1").exists()
    assert not [path for path in (tmp_path, Path.home(), Path("/")) if (path / "PWNED").exists()]


def test_the_script_of_an_environment_is_that_of_the_jobs_folder(hosts: Hosts, tmp_path: Path) -> None:
    """A login shell begins in another folder, and bash looks for a name in PATH."""
    (tmp_path / "activate").write_text(f"export PATH={sys.prefix}/bin:$PATH\n")
    options = ["--venv_script", "activate", WAIT, tmp_path, "--end"]
    done = hosts.run("ssh", hosts.hostfile(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank1").exists()


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("openmpi", marks=pytest.mark.slow)])
def test_a_name_of_rank_0_that_a_host_does_not_know(hosts: Hosts, launcher: str, tmp_path: Path) -> None:
    """Nothing is started: gloo would look for it for more than a minute."""
    done = hosts.run(launcher, hosts.hostfile(tmp_path), "--master_addr", "nobody-knows", WAIT, tmp_path, "--end")
    assert done.returncode == 2, done.stderr
    assert ": --master_addr 'nobody-knows' does not resolve on node" in done.stderr
    assert not list(tmp_path.glob("rank*"))
