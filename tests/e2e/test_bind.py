# SPDX-License-Identifier: Apache-2.0
"""`anyaccel bind` below a shell and below the real launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anyaccel.topology import read_machine

MACHINE = read_machine()
CPUS = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(MACHINE.cores()) < 2, reason="needs two allowed physical cores")

SHOW = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")
maps = open("/proc/self/numa_maps").read() if os.path.exists("/proc/self/numa_maps") else ""
print(json.dumps({
    "env": {name: os.environ.get(name) for name in names},
    "cores": sorted(os.sched_getaffinity(0)),
    "bound": " bind" in maps.split(chr(10))[0],
}))
"""
BIND = (sys.executable, "-m", "anyaccel", "bind")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in a fresh folder that has show.py, without the variables of any launcher."""
    (tmp_path / "show.py").write_text(SHOW)

    def call(*command: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        foreign = (
            "OMP_",
            "OMPI_",
            "PMI",
            "MPI_",
            "MV2_",
            "SLURM_",
            "GOMP_",
            "KMP_",
            "LOCAL_",
            "TORCHELASTIC",
            "CROSS_",
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**inherited, **env}, timeout=100
        )
        assert done.returncode == code, done.stderr
        return done

    return call


def shown(done: subprocess.CompletedProcess[str]) -> list[dict[str, dict[str, str | None]]]:
    """What the processes printed, by local rank."""
    found, end = [], 0
    while (begin := done.stdout.find("{", end)) >= 0:  # mpirun may put what two ranks print on one line
        worker, end = json.JSONDecoder().raw_decode(done.stdout, begin)
        found.append(worker)
    return sorted(found, key=lambda worker: worker["env"]["LOCAL_RANK"])


def check_division(workers: list[dict[str, dict[str, str | None]]]) -> None:
    """Two processes on cores of their own, told so."""
    assert len(workers) == 2
    assert not set(workers[0]["cores"]) & set(workers[1]["cores"])
    for rank, worker in enumerate(workers):
        cores = worker["cores"]
        assert worker["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": str(len(cores)),
            "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores),
            "OMP_PROC_BIND": "false",
        }


@two_cores
def test_by_hand(run: Run) -> None:
    workers = [
        shown(run(*BIND, "--local_rank", str(rank), "--local_size", "2", "--", sys.executable, "show.py"))[0]
        for rank in (0, 1)
    ]
    assert not set(workers[0]["cores"]) & set(workers[1]["cores"])
    assert workers[1]["env"]["LOCAL_RANK"] == "1"
    assert workers[1]["env"]["RANK"] is None


@two_cores
def test_below_torchrun(run: Run) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python")
    done = run(*torchrun, *BIND, "--", sys.executable, "show.py")
    check_division(shown(done))
    if len(MACHINE.cores()) >= 4:
        assert "anyaccel: OMP_NUM_THREADS=1, which torchrun sets by itself, becomes" in done.stderr


def mpirun(*options: str) -> tuple[str, ...]:
    """mpirun of Open MPI for two processes; skips where there is none."""
    program = shutil.which("mpirun.openmpi")
    if program is None:
        pytest.skip("Open MPI is not installed: apt install openmpi-bin")
    return (program, "--oversubscribe", *options, "-np", "2")


ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@two_cores
def test_below_open_mpi(run: Run) -> None:
    check_division(shown(run(*mpirun("--bind-to", "none"), *BIND, "--", sys.executable, "show.py", **ROOT)))


@two_cores
def test_what_open_mpi_has_bound_is_kept(run: Run) -> None:
    done = run(*mpirun("--bind-to", "core"), *BIND, "--", sys.executable, "show.py", **ROOT)
    check_division(shown(done))  # it gave each a core of its own
    lines = [line for line in done.stderr.splitlines() if line.startswith("anyaccel:")]
    assert len(lines) == 1
    assert "Open MPI has bound this process to CPU" in lines[0]
    assert lines[0].endswith("mpirun --bind-to none")
    strict = run(*mpirun("--bind-to", "core"), *BIND, "--strict", "--", "true", code=2, **ROOT)
    assert "anyaccel: error: Open MPI has bound" in strict.stderr


@two_cores
@pytest.mark.parametrize("program", ["mpiexec.hydra", "mpiexec.mpich"])
def test_below_mpich(run: Run, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt install mpich, or pip install impi-rt")
    done = run(program, "-np", "2", *BIND, "--", sys.executable, "show.py", I_MPI_PIN="off")
    check_division(shown(done))


def test_a_cpu_that_taskset_leaves(run: Run) -> None:
    last = CPUS[-1]
    done = run(
        "taskset", "-c", str(last), *BIND, "--local_rank", "0", "--local_size", "1", "--", sys.executable, "show.py"
    )
    assert shown(done)[0]["cores"] == [last]


@pytest.mark.skipif(not MACHINE.allowed_memory_nodes, reason="a kernel without NUMA support")
def test_memory_and_allocator(run: Run) -> None:
    by_hand = (*BIND, "--local_rank", "0", "--local_size", "1")
    done = run(*by_hand, "--", sys.executable, "show.py")
    if "usual in containers" in done.stderr:
        pytest.skip(f"this kernel or container refuses memory policies: {done.stderr}")
    assert shown(done)[0]["bound"]
    assert not shown(run(*by_hand, "--mem-policy", "none", "--", sys.executable, "show.py"))[0]["bound"]


@pytest.mark.parametrize("name", ["tcmalloc", "jemalloc"])
def test_the_allocator_is_in_the_command(run: Run, name: str) -> None:
    by_hand = (*BIND, "--local_rank", "0", "--local_size", "1", "--malloc", name)
    code = "print([line for line in open('/proc/self/maps') if 'malloc' in line][0])"
    done = subprocess.run([*by_hand, "--", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert f"lib{name}" in done.stdout


def test_the_command_gets_its_arguments_and_its_exit_code_is_ours(run: Run) -> None:
    done = run(
        *BIND,
        "--",
        "sh",
        "-c",
        'printf "%s|" "$@"; exit 7',
        "sh",
        "a b",
        "",
        "$x",
        "--",
        "\n",
        "ä",
        code=7,
        LOCAL_RANK="0",
        LOCAL_SIZE="1",
    )
    assert done.stdout == "a b||$x|--|\n|ä|"
    assert run(*BIND, "--", "sh", "-c", "kill -PIPE $$", code=-13, LOCAL_RANK="0", LOCAL_SIZE="1").stdout == ""


def test_dry_run(run: Run) -> None:
    done = run(*BIND, "--local_size", "1", "--dry-run")
    assert done.stdout.startswith("topology: ")
    assert "local rank 0: core" in done.stdout
    assert run(*BIND, "--dry-run", "--", "false", LOCAL_RANK="0", LOCAL_SIZE="1").stdout.count("local rank") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ((), 2, ["no command was given", "after --"]),
        (("--", "true"), 2, ["no local rank", "SLURM_LOCALID", "--local_rank"]),
        (("--local_rank", "0", "--", "true"), 2, ["--local_rank was given without --local_size"]),
        (("--local_size", "2", "--", "true"), 2, ["--local_size was given without --local_rank"]),
        (("--local_rank", "2", "--local_size", "2", "--", "true"), 2, ["--local_rank is 2", "below --local_size"]),
        (("--local_rank", "0", "--local_size", "60000", "--", "true"), 2, ["60000 workers", "only"]),
        (("--local_rank", "0", "--local_size", "1", "--", "no-such-program"), 127, ["'no-such-program' was not found"]),
        (("--local_rank", "0", "--local_size", "1", "--", "./show.py"), 126, ["'./show.py' cannot be started"]),
        (("--mem-policy", "all", "--", "true"), 2, ["'all'"]),
        (("--smt", "--bind_core_list", "0", "--", "true"), 2, ["--smt and --bind_core_list contradict"]),
    ],
)
def test_mistakes_are_one_line(run: Run, arguments: tuple[str, ...], code: int, parts: list[str]) -> None:
    done = run(*BIND, *arguments, code=code)
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("anyaccel: error: ")
    assert all(part in lines[0] for part in parts)


@two_cores
def test_settings_that_conflict(run: Run) -> None:
    by_hand = (*BIND, "--local_rank", "0", "--local_size", "2")
    other = str(MACHINE.cores()[-1].id)
    done = run(*by_hand, "--", "sh", "-c", "echo $GOMP_CPU_AFFINITY", GOMP_CPU_AFFINITY=other)
    own = done.stdout.strip()
    assert own != other
    assert done.stderr.startswith(f"anyaccel: warning: GOMP_CPU_AFFINITY={other} is about CPUs that are not")
    strict = run(*by_hand, "--strict", "--", "true", code=2, GOMP_CPU_AFFINITY=other)
    assert "because of --strict" in strict.stderr


RUN = (sys.executable, "-m", "anyaccel", "run", "--no_local_rank", "--no_python")


@two_cores
@pytest.mark.parametrize("launcher", ["Open MPI", "MPICH", "Intel MPI"])
def test_below_an_mpi_below_run(run: Run, launcher: str) -> None:
    """The innermost launcher counts, and what the outer one has set for itself is replaced."""
    if launcher == "Open MPI":
        command = mpirun("--bind-to", "none")
    else:
        folder = Path(sys.prefix) / "impi" / "bin"
        program = (
            shutil.which("mpiexec.hydra", path=str(folder))
            if launcher == "Intel MPI"
            else shutil.which("mpiexec.mpich")
        )
        if program is None:
            pytest.skip(f"{launcher} is not installed: apt install mpich, or tools/install_test_tools.sh")
        command = (program, "-np", "2")
    done = run(
        *RUN, "--num_accelerators", "1", *command, *BIND, "--", sys.executable, "show.py", I_MPI_PIN="off", **ROOT
    )
    check_division(shown(done))
    assert "warning" not in done.stderr


@two_cores
def test_below_run_that_binds(run: Run) -> None:
    run_two = (*RUN, "--num_accelerators", "2")
    for options in (("--bind_cores_to_rank",), ()):
        done = run(*run_two, *options, *BIND, "--strict", "--", sys.executable, "show.py")
        check_division(shown(done))
        assert done.stderr == ""


def test_more_ranks_than_cores_below_an_mpi(run: Run) -> None:
    """As by hand: nobody shares a core, and nobody is told to switch off a binding that is not there."""
    program = shutil.which("mpiexec.mpich") or shutil.which("mpiexec.hydra")
    if program is None:
        pytest.skip("MPICH is not installed: apt install mpich")
    cores = len(MACHINE.cores())
    done = subprocess.run(
        [program, "-np", str(cores + 1), *BIND, "--", "true"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert said.count("cannot each have a core of their own") == cores + 1
    assert "already" not in said


@two_cores
def test_what_a_bind_above_has_bound_is_kept(run: Run) -> None:
    twice = (*BIND, "--local_rank", "1", "--local_size", "2", "--", *BIND, "--strict", "--")
    once = shown(run(*twice[: len(BIND) + 5], sys.executable, "show.py"))
    done = run(*twice, sys.executable, "show.py")
    assert shown(done) == once
    assert done.stderr == ""
