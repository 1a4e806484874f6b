# SPDX-License-Identifier: Apache-2.0
"""Where the output of `anyaccel run` goes: log files, the console, prefixes, the launcher's own lines."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = """
import os, sys
rank = os.environ["RANK"]
print("out of", rank, flush=True)
print("err of", rank, file=sys.stderr, flush=True)
sys.stdout.write("no newline at the end")
if sys.argv[-1] == "fail" and rank == "1":
    sys.exit(7)
"""


def run(*arguments, cwd, **kwargs):
    command = [sys.executable, "-m", "anyaccel", "run", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, **kwargs)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


def logs(folder):
    found = {}
    for path in sorted(Path(folder).iterdir()):
        stamp, rank = re.fullmatch(r"(\d{14})_rank(\d+)\.log", path.name).groups()
        assert stamp.startswith("20")
        found[int(rank)] = path.read_text()
    return found


def test_each_rank_has_a_log_and_the_console_is_silent(folder):
    done = run("--num_accelerators", 2, "--enable_each_rank_log", "logs/deep", "worker.py", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = logs(folder / "logs" / "deep")
    assert sorted(found) == [0, 1]
    for rank, text in found.items():
        assert sorted(text.splitlines()) == [f"err of {rank}", "no newline at the end", f"out of {rank}"]


def test_tee_shows_it_as_well_on_the_right_streams(folder):
    done = run("--num_accelerators", 1, "--enable_each_rank_log", "logs", "--tee", "worker.py", cwd=folder)
    assert done.stdout == "out of 0\nno newline at the end\n"
    assert done.stderr == "err of 0\n"
    assert "out of 0" in logs(folder / "logs")[0]


def test_each_line_can_name_its_rank(folder):
    done = run("--num_accelerators", 2, "--rank-prefix", "worker.py", cwd=folder)
    expected = [f"[rank{rank}] {text}" for rank in (0, 1) for text in (f"out of {rank}", "no newline at the end")]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert sorted(done.stderr.splitlines()) == ["[rank0] err of 0", "[rank1] err of 1"]


def test_a_failure_is_explained_although_the_output_went_to_a_log(folder):
    done = run("--num_accelerators", 2, "--enable_each_rank_log", "logs", "-q", "worker.py", "fail", cwd=folder)
    assert done.returncode == 7
    assert re.fullmatch(
        r"anyaccel: error: rank 1 \(process \d+\) exited with code 7(; 1 other worker was ended)?\n"
        r"anyaccel: last lines of rank 1 on standard error:\n"
        r"anyaccel:   \| err of 1\n",
        done.stderr,
    )


def test_a_full_disk_in_the_log_folder_does_not_end_the_job(folder, tmp_path):
    """A real full file system: the logs of a small tmpfs that has no page left."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        code = "import sys; print('x' * 30000); print('y' * 60000, flush=True); print('the end')"
        (folder / "much.py").write_text(code)
        done = run("--num_accelerators", 1, "--enable_each_rank_log", disk, "much.py", cwd=folder)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.returncode == 0
    assert done.stderr.count("cannot be written: No space left on device; the job goes on") == 1
    assert done.stdout.endswith("the end\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tee"], "--tee shows what goes to log files, and there are none; add --enable_each_rank_log DIR"),
        (["--enable_each_rank_log", "worker.py"], "'worker.py' cannot be made: File exists; give another folder"),
        (["--enable_each_rank_log", ""], "--enable_each_rank_log is empty"),
        (["--log_level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_options_that_cannot_be(folder, arguments, message):
    done = run(*arguments, "worker.py", cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_process_id_can_be_found_and_is_forgotten_afterwards(folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(folder))
    (folder / "show.py").write_text(
        "import glob, os\n[name] = glob.glob('*.anyaccel')\n"
        "print(open(name).read().strip(), os.readlink(f'/proc/{int(open(name).read())}/exe'))\n"
    )
    done = run("--num_accelerators", 1, "--save_pid", "show.py", cwd=folder)
    said, shown = done.stdout.splitlines()
    pid, program = shown.split()
    assert said == f"anyaccel: process id {pid} is in {folder}/{pid}.anyaccel"
    assert Path(program).name.startswith("python")
    assert list(folder.glob("*.anyaccel")) == []


def test_workers_run_in_an_environment_that_a_script_makes(folder):
    (folder / "activate here").write_text("export FROM_SCRIPT='a value'\n")
    command = ["--no_python", "--no_local_rank", "sh", "-c", 'printf "%s|" "$FROM_SCRIPT" "$@"', "sh", "a  b", "", "$x"]
    done = run("--num_accelerators", 1, "--venv_script", "./activate here", *command, cwd=folder)
    assert (done.stdout, done.returncode) == ("a value|a  b||$x|", 0)


@pytest.mark.parametrize("name", ["activate", "-activate"])
def test_the_script_of_an_environment_is_not_looked_for_elsewhere(folder, name):
    """bash would take another one of this name in PATH, and one with a dash for an option."""
    (folder / name).write_text("export FROM_SCRIPT=mine\n")
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text("export FROM_SCRIPT=another\n")
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = ["--no_python", "--no_local_rank", "sh", "-c", 'echo "$FROM_SCRIPT"']
    done = run("--num_accelerators", 1, f"--venv_script={name}", *command, cwd=folder, env=environ)
    assert (done.stdout, done.returncode) == ("mine\n", 0), done.stderr


def test_a_script_of_an_environment_that_fails_is_named(folder):
    (folder / "activate").write_text("exit 7\n")
    done = run("--num_accelerators", 1, "--venv_script", "activate", "--no_python", "true", cwd=folder)
    assert done.returncode == 7
    assert "--venv_script ./activate failed with exit code 7\n" in done.stderr


def test_a_run_inside_a_worker_plans_with_its_own_threads(folder):
    """The outer one has set OMP_NUM_THREADS for all cores of its only worker."""
    cores = len(os.sched_getaffinity(0))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    here = ["--no_local_rank", "--no_python"]
    inner = [sys.executable, "-m", "anyaccel", "run", *here, "--num_accelerators", str(max(cores, 2))]
    say = ["sh", "-c", "echo $OMP_NUM_THREADS"]
    done = run("--num_accelerators", 1, *here, *inner, *say, cwd=folder, env=environ)
    assert done.stdout.split() == ["1"] * max(cores, 2), done.stderr
    users = ["sh", "-c", 'OMP_NUM_THREADS=3 "$@"; exit $?', "sh", *inner, *say]
    done = run("--num_accelerators", 1, *here, *users, cwd=folder, env=environ)
    assert done.stdout.split() == ["3"] * max(cores, 2), done.stderr


def test_no_hostfile_can_be_said_as_for_deepspeed(folder):
    done = run(
        "--hostfile=/dev/null", "--num_accelerators", 1, "--no_python", "--no_local_rank", "echo", "1", cwd=folder
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_debug_says_where_the_logs_are(folder):
    options = ["--num_accelerators", 1, "--log_level", "debug", "--enable_each_rank_log", "logs"]
    done = run(*options, "worker.py", cwd=folder)
    assert re.search(r"anyaccel: log of rank 0: logs/\d+_rank0\.log\n", done.stderr)


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory):
    """A real file system with four pages."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path_factory.mktemp("full")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("hosts", ["", "localhost slots=1\n127.0.0.1 slots=1\n"], ids=["here", "hosts"])
@pytest.mark.parametrize(
    ("descriptor", "code"),
    [
        (1, "print('x' * 40_000)"),  # all of it is in the pipe when the worker has ended
        (1, "while True: print('x' * 99)"),
        (2, "import sys\nprint('x' * 40_000, file=sys.stderr)"),
        (2, "import sys\nwhile True: print('x' * 99, file=sys.stderr)"),
    ],
    ids=["out", "out for ever", "err", "err for ever"],
)
def test_output_that_a_full_disk_does_not_take_is_an_error(folder, full_disk, descriptor, code, hosts):
    (folder / "much.py").write_text(code)
    (folder / "hosts").write_text(hosts)
    options = ["--hostfile", "hosts"] if hosts else ["--num_accelerators", 1, "--rank-prefix"]
    command = [sys.executable, "-m", "anyaccel", "run", *map(str, options), "--no_local_rank", "much.py"]
    other = {1: "stderr", 2: "stdout"}[descriptor]
    with open(full_disk / "output", "wb") as file:
        streams = {{1: "stdout", 2: "stderr"}[descriptor]: file, other: subprocess.PIPE}
        done = subprocess.run(command, cwd=folder, text=True, timeout=60, **streams)
    assert (full_disk / "output").stat().st_size > 8_000
    (full_disk / "output").unlink()
    assert done.returncode == 1
    if descriptor == 1:
        assert (
            done.stderr.count("anyaccel: error: standard output: No space left on device; output of the workers is")
            == 1
        )


@pytest.mark.parametrize("hosts", ["", "localhost slots=1\n127.0.0.1 slots=1\n"], ids=["here", "hosts"])
@pytest.mark.parametrize("descriptor", [1, 2])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_reader_that_has_gone_is_gone_for_the_workers_too(folder, hosts, descriptor, prefix):
    """As `anyaccel run ... yes | head -1` does: without a launcher in between SIGPIPE would end it."""
    (folder / "hosts").write_text(hosts)
    options = ["--hostfile", "hosts"] if hosts else ["--num_accelerators", "1"]
    options += ["--rank-prefix"] if prefix else []
    shell = ["--no_local_rank", "--no_python", "sh", "-c", f"exec yes >&{descriptor}"]
    read_end, write_end = os.pipe()
    other = {1: "stderr", 2: "stdout"}[descriptor]
    streams = {{1: "stdout", 2: "stderr"}[descriptor]: write_end, other: subprocess.DEVNULL}
    command = [sys.executable, "-m", "anyaccel", "run", *options, *shell]
    with subprocess.Popen(command, cwd=folder, **streams) as child:
        os.close(write_end)
        first = os.read(read_end, 2)
        os.close(read_end)
        try:
            assert child.wait(timeout=60) == 128 + signal.SIGPIPE
        finally:
            child.terminate()
    assert first == (b"[r" if prefix else b"y\n")


def test_a_reader_that_has_gone_does_not_end_what_goes_to_log_files(folder):
    shell = ["--no_local_rank", "--no_python", "seq", "100000"]
    options = ["--num_accelerators", "1", "--enable_each_rank_log", "logs", "--tee"]
    command = [sys.executable, "-m", "anyaccel", "run", *options, *shell]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(timeout=60) == 1
    assert (
        said == b"anyaccel: error: standard output: Broken pipe; the job goes on, and its output is in the log files\n"
    )
    assert logs(folder / "logs")[0].endswith("\n100000\n")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_output_that_was_closed_by_the_caller_is_not_missed(folder, closed):
    (folder / "much.py").write_text("import os\nfor d in (1, 2): os.write(d, b'x' * 40_000)")
    command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "1", "--rank-prefix", "much.py"]
    shell = ["sh", "-c", f'exec {closed}>&-; exec "$@"', "sh", *command]
    assert subprocess.run(shell, cwd=folder, capture_output=True, timeout=60).returncode == 0


def test_no_link_that_somebody_put_in_place_of_a_log_is_followed(folder, tmp_path, monkeypatch):
    """The name of a log file can be guessed, and its folder may be one that everybody may write to."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    place = tmp_path / "logs"
    place.mkdir()
    # Links for some seconds to come, and a file of another job.
    for second in range(30):
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(time.time() + second))
        (place / f"{name}_rank0.log").symlink_to(victim)
        (place / f"{name}_rank1.log").write_text("of another job\n")
    done = run("--num_accelerators", 2, "--enable_each_rank_log", place, "worker.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "precious\n"
    for rank in (0, 1):
        [log] = place.glob(f"*_rank{rank}.1.log")
        assert f"out of {rank}" in log.read_text()
    assert {path.read_text() for path in place.glob("*_rank1.log")} == {"of another job\n"}


@pytest.mark.parametrize("options", [[], ["--hostfile", "HOSTS"]], ids=["here", "hosts"])
def test_a_current_folder_that_was_deleted_is_named(tmp_path, options):
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / "gone").mkdir()
    words = [word.replace("HOSTS", str(tmp_path / "hosts")) for word in options]
    command = [sys.executable, "-m", "anyaccel", "run", *words, "worker.py"]
    shell = ["sh", "-c", 'rmdir ../gone && exec "$@"', "sh", *command]
    done = subprocess.run(shell, cwd=tmp_path / "gone", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("anyaccel: error: the current folder is not there any more (No such file or directory); cd")
