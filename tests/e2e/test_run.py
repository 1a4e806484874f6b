# SPDX-License-Identifier: Apache-2.0
"""`anyaccel run` without anything going wrong, and every mistake of its user."""

import json
import os
import socket
import subprocess
import sys

import pytest

import ranks
from anyaccel.topology import read_machine

MACHINE = read_machine()
CPUS = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(MACHINE.cores()) < 2, reason="needs two allowed physical cores")
two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two allowed CPUs")

SHOW = """
import json, os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT"
maps = "/proc/self/numa_maps"
policy = [line.split()[1] for line in open(maps)][:1] if os.path.exists(maps) else []
with open(f"out-{os.environ['RANK']}", "w") as file:
    json.dump({
        "env": {name: os.environ.get(name) for name in [*names.split(), "OMP_NUM_THREADS", "MINE"]},
        "argv": sys.argv[1:],
        "cores": sorted(os.sched_getaffinity(0)),
        "policy": policy,
        "unbuffered": sys.stdout.write_through,
    }, file)
"""


@pytest.fixture
def run(tmp_path):
    """Runs `anyaccel run ...` in a fresh folder that has show.py."""
    (tmp_path / "show.py").write_text(SHOW)

    def call(*arguments, code=0, prefix=(), **env):
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "anyaccel", "run", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**variables, **env},
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return done

    call.folder = tmp_path
    return call


def shown(run, rank):
    return json.loads((run.folder / f"out-{rank}").read_text())


def only_error(done):
    """The one line on standard error."""
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("anyaccel: error: ")
    return lines[0]


@two_cores
def test_two_bound_workers(run):
    done = run("--num_accelerators", "2", "--bind_cores_to_rank", "show.py", "--flag", "a b", "--", "--num_gpus", "")
    assert done.stderr == ""
    ports = set()
    cores = []
    for rank in (0, 1):
        worker = shown(run, rank)
        ports.add(worker["env"].pop("MASTER_PORT"))
        cores.append(worker["cores"])
        assert worker["env"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": str(len(worker["cores"])),
            "MINE": None,
        }
        assert worker["argv"] == [f"--local_rank={rank}", "--flag", "a b", "--", "--num_gpus", ""]
        assert worker["unbuffered"] is True
    assert len(ports) == 1
    assert not set(cores[0]) & set(cores[1])


@two_cpus
def test_core_list_in_the_order_given(run):
    first, second = CPUS[:2]
    run("--num-gpus", "2", "--bind-core-list", f"{second},{first}", "--no-local-rank", "show.py")
    assert shown(run, 0)["cores"] == [second]
    assert shown(run, 1)["cores"] == [first]
    assert shown(run, 0)["argv"] == []


@pytest.mark.skipif(not MACHINE.allowed_memory_nodes, reason="a kernel without NUMA support")
def test_memory_is_bound(run):
    done = run("--num_accelerators", "1", "--bind_core_list", str(CPUS[0]), "show.py")
    policy = shown(run, 0)["policy"]
    if "Operation not permitted" in done.stderr or "Function not implemented" in done.stderr:
        pytest.skip(f"this kernel or container refuses memory policies: {done.stderr}")
    assert done.stderr == ""
    assert [text.partition(":")[0] for text in policy] == ["bind"]


def test_memory_that_cannot_be_bound_is_a_warning():
    """As in a container that forbids set_mempolicy: the cores are bound all the same."""
    cpu = CPUS[-1]
    code = f"""
import os
from anyaccel import _native
from anyaccel.launch.local import worker
from anyaccel.launch.plan.plan import RankBinding
def refuse(mode, nodes):
    raise PermissionError(1, "whatever the caller is called")
_native.set_mempolicy = refuse
worker.bind_worker(RankBinding(3, 3, ({cpu},), "bind", (0,), {{}}), worker._say)
print(os.sched_getaffinity(0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{{{cpu}}}\n")
    assert done.stderr == (
        "anyaccel: warning: memory of rank 3 is not bound to node 0: Operation not permitted (usual in containers); "
        f"its cores are bound to {cpu}\n"
    )


def test_unbound_workers_keep_all_cores_and_the_users_environment(run):
    run("--num_accelerators", "1", "show.py", MINE="1", OMP_NUM_THREADS="7")
    worker = shown(run, 0)
    assert worker["cores"] == CPUS
    assert worker["env"]["MINE"] == "1"
    assert worker["env"]["OMP_NUM_THREADS"] == "7"


def test_only_the_allowed_cores_are_used(run):
    last = str(CPUS[-1])
    run("--num_accelerators", "1", "--bind_cores_to_rank", "show.py", prefix=("taskset", "-c", last))
    assert shown(run, 0)["cores"] == [CPUS[-1]]


def test_module_and_program(run):
    package = run.folder / "package"
    package.mkdir()
    (package / "part.py").write_text(SHOW)
    run("--num_accelerators", "1", "-m", "package.part", "x")
    assert shown(run, 0)["argv"] == ["--local_rank=0", "x"]
    program = run.folder / "program"
    program.write_text('#!/bin/sh\necho "$RANK $@"\n')
    program.chmod(0o755)
    assert run("--num_accelerators", "1", "--no_python", "--", "./program", "a").stdout == "0 --local_rank=0 a\n"
    assert run("--num_gpus=1", "--no_python", "--no_local_rank", "echo", "--json").stdout == "--json\n"


def test_standard_streams_pass_through(run):
    (run.folder / "talk.py").write_text(
        "import sys; print('out'); sys.stderr.buffer.write(bytes(range(256)) * 1000); sys.stderr.write('end')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "2", "talk.py"],
        capture_output=True,
        cwd=run.folder,
        timeout=60,
    )
    assert done.returncode == 0
    assert (done.stdout.count(b"out"), len(done.stdout)) == (2, 8)
    assert len(done.stderr) == 2 * (256_000 + 3)
    assert done.stderr.count(b"end") == 2


@pytest.mark.parametrize("closed", ["0<&- 2>&-", "1>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams(run, closed):
    command = f'exec "{sys.executable}" -m anyaccel run --num_accelerators 2 show.py {closed}'
    assert subprocess.run(["sh", "-c", command], cwd=run.folder, timeout=60, stdin=subprocess.DEVNULL).returncode == 0
    assert shown(run, 1)["env"]["RANK"] == "1"


def test_dry_run_starts_nothing(run):
    done = run("--num_accelerators", "1", "--bind_cores_to_rank", "--dry-run", "show.py", "--x")
    assert "topology: " in done.stdout
    assert "rank 0: core" in done.stdout
    assert "show.py --local_rank=0 --x" in done.stdout
    assert not (run.folder / "out-0").exists()


def test_dry_run_json(run):
    plan = json.loads(run("--num_accelerators", "1", "--bind_cores_to_rank", "--dry_run", "--json", "show.py").stdout)
    assert plan["world_size"] == 1
    assert set(plan["ranks"][0]["cores"]) <= set(CPUS)
    assert plan["ranks"][0]["env"]["RANK"] == "0"
    assert plan["commands"][0][1:] == ["-u", "show.py", "--local_rank=0"]
    assert "allowed" in plan["topology"]


def test_help_shows_examples(run):
    done = run("--help")
    assert "examples:" in done.stdout
    for option in (
        "--num_accelerators",
        "--num_gpus",
        "--bind_core_list",
        "--no_local_rank",
        "--grace-period",
    ):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["no script was given"]),
        (["--"], ["no script was given"]),
        (["--num_accelerators", "2"], ["no script was given"]),
        (["--nmu_accelerators", "2", "show.py"], ["unrecognized arguments", "--nmu_accelerators"]),
        (["--num_accel", "2", "show.py"], ["unrecognized arguments"]),
        (["--num_accelerators", "two", "show.py"], ["'two'"]),
        (["--num_accelerators", "0", "show.py"], ["is 0", "at least 1"]),
        (["--bind_core_list", "0-x", "show.py"], ["'0-x'", "0-27,32-59"]),
        (["--bind_core_list", "", "show.py"], ["--bind_core_list is empty"]),
        (["--bind_core_list", "0,0", "show.py"], ["CPU 0 more than once"]),
        (["--bind_core_list", "60000", "show.py"], ["CPU 60000", "does not have"]),
        (["--num_accelerators", "60000", "--bind_cores_to_rank", "show.py"], ["60000 workers", "only"]),
        (
            ["--num_accelerators", "2", "--bind_core_list", str(CPUS[0]), "show.py"],
            ["2 workers cannot share the 1 CPU"],
        ),
        (["--master_port", "99999", "show.py"], ["99999"]),
        (["--grace-period", "-1", "show.py"], ["-1"]),
        (["missing.py"], ["'missing.py' does not exist"]),
        (["--dry-run", "missing.py"], ["'missing.py' does not exist"]),
        (["--master_addr", "a b", "show.py"], ["--master_addr is 'a b'", "name of a host"]),
        (["--master_addr", "a" * 64, "show.py"], ["does not resolve on"]),
        (["--dry-run", "--master_addr", "nobody.invalid", "show.py"], ["'nobody.invalid' does not resolve on"]),
        (["--module", "--no_python", "x"], ["contradict"]),
        (["--json", "show.py"], ["--dry-run"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(run, arguments, parts):
    line = only_error(run(*arguments, code=2))
    for part in parts:
        assert part in line
    assert not list(run.folder.glob("out-*"))


@pytest.mark.parametrize(
    ("program", "code", "part"),
    [
        ("no-such-program-here", 127, "is not a program in PATH"),
        ("./no-such-program", 127, "does not exist in"),
        ("./show.py", 126, "is not an executable file"),
        ("/", 126, "is not an executable file"),
    ],
)
def test_a_program_that_cannot_be_run_is_as_in_a_shell(run, program, code, part):
    assert part in only_error(run("--no_python", program, code=code))
    (run.folder / "hosts").write_text("localhost slots=1\n")
    assert part in only_error(run("--hostfile", "hosts", "--no_python", program, code=code))
    assert not list(run.folder.glob("out-*"))


@two_cpus
def test_a_cpu_that_is_not_allowed(run):
    arguments = ("--num_accelerators", "1", "--bind_core_list", str(CPUS[1]), "show.py")
    line = only_error(run(*arguments, code=2, prefix=("taskset", "-c", str(CPUS[0]))))
    assert f"CPU {CPUS[1]}, which this process may not use" in line


def test_unknown_accelerator_needs_a_number(run):
    assert "give --num_accelerators" in only_error(run("show.py", code=2, DS_ACCELERATOR="hpu"))
    run("--num_accelerators", "1", "show.py", DS_ACCELERATOR="hpu")


def test_port_in_use_and_port_free(run):
    port = str(ranks.free_port())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(port)))
        listener.listen()
        assert f"--master_port {port} cannot be used" in only_error(run("--master_port", port, "show.py", code=2))
    run("--num_accelerators", "1", "--master_port", port, "--master_addr", "localhost", "show.py")
    assert shown(run, 0)["env"]["MASTER_PORT"] == port
    assert shown(run, 0)["env"]["MASTER_ADDR"] == "localhost"


def test_the_launcher_imports_neither_torch_nor_slow_modules():
    code = (
        "import sys; before = set(sys.modules); import anyaccel.cli.run; new = set(sys.modules) - before; "
        "print(*new & {'torch', 'numpy', 'subprocess', 'asyncio', 'pathlib', 'json', 'socket'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
