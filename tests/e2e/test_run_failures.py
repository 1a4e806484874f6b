# SPDX-License-Identifier: Apache-2.0
"""What `anyaccel run` does when something dies: real signals, real processes, nothing left behind."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

import pytest

from anyaccel.launch.local.protocol import SAME_MOMENT
from waiting import settled

# Seconds that a busy machine may need for what the documentation promises within 5; what is forgotten lives 600.
GONE_WITHIN = 60.0

WORKER = """
import os, signal, subprocess, sys, time
rank, case = int(os.environ["RANK"]), sys.argv[1]
if "stubborn" in case:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if "note" in case:
    def note(number, frame):
        with open(f"signals-{rank}", "a") as file:
            file.write(f"{number}\\n")
        if number == signal.SIGTERM or "quit" in case:
            sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
if "slow" in case and rank == 0:
    def finish(number, frame):
        with open("signals-0", "a") as file:
            file.write(f"{number}\\n")
        while not os.path.exists("release"):
            time.sleep(0.01)
        sys.exit(0)
    signal.signal(signal.SIGTERM, finish)
if "1wait" in case and rank == 1:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if "grandchild" in case:
    # In a session of its own and deaf to SIGTERM: only its descent tells whose it is.
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); open('deaf', 'w'); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not os.path.exists("deaf"):
        time.sleep(0.01)
with open(f"tmp-{rank}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"tmp-{rank}", f"ready-{rank}")
if "ok" in case:
    while not os.path.exists("go"):
        time.sleep(0.01)
    sys.exit(0)
while not os.path.exists("go"):
    time.sleep(0.01)
if "exit3" in case and rank == 1:
    print("something went wrong on rank 1", file=sys.stderr)
    sys.exit(3)
time.sleep(600)
"""


RUN = [sys.executable, "-m", "anyaccel", "run"]


def wait_for(file):
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} does not appear"
        time.sleep(0.01)


class Job:
    """A launcher with two workers in a session of its own."""

    def __init__(self, folder, case, *options, terminal=None, prefix=()):
        self.folder = folder
        self.tag = uuid.uuid4().hex
        (folder / "worker.py").write_text(WORKER)
        self.log = folder / "log"
        command = [*RUN, "--num_accelerators", "2", "--no_local_rank"]
        with self.log.open("wb") as log:
            self.launcher = subprocess.Popen(
                [*prefix, *command, *options, "worker.py", case],
                cwd=folder,
                env={**os.environ, "ANYACCEL_TEST_JOB": self.tag},
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # What starts the tests in the background may have them ignore it.
                preexec_fn=lambda: (
                    signal.signal(signal.SIGINT, signal.SIG_DFL),
                    terminal is None or fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
                ),
            )
        self.workers = [self._ready(rank) for rank in (0, 1)]
        with open(f"/proc/{self.workers[0]}/stat") as file:
            self.guardian = int(file.read().rpartition(")")[2].split()[1])

    def _ready(self, rank):
        file = self.folder / f"ready-{rank}"
        deadline = time.monotonic() + 60
        while not file.exists():
            assert self.launcher.poll() is None, self.text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(file.read_text())

    def go(self):
        (self.folder / "go").touch()

    def text(self):
        return self.log.read_text(errors="replace")

    def alive(self):
        """Processes that have the tag of this job in their environment, zombies left out."""
        found = set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self.tag.encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
        return found

    def end(self, code):
        """Wait for the end; the exit code is `code` and nothing is left. Returns what was printed."""
        deadline = time.monotonic() + GONE_WITHIN
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self.alive(), f"still alive after {GONE_WITHIN} s; the log says\n{self.text()}"
        assert self.launcher.wait(60) == code, self.text()
        return self.text()

    def clean_up(self):
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(case, *options, **kwargs):
        jobs.append(Job(tmp_path, case, *options, **kwargs))
        return jobs[-1]

    yield start
    for started in jobs:
        started.clean_up()


def test_all_is_well(job):
    started = job("ok")
    started.go()
    assert started.end(0) == ""


def test_a_worker_fails(job):
    started = job("exit3")
    started.go()
    text = started.end(3)
    assert f"error: rank 1 (process {started.workers[1]}) exited with code 3; 1 other worker was ended" in text
    assert "last lines of rank 1 on standard error:\nanyaccel:   | something went wrong on rank 1" in text
    assert "rank 0" not in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_worker_is_killed(job, number):
    started = job("wait")
    os.kill(started.workers[0], number)
    text = started.end(128 + number)
    assert f"error: rank 0 (process {started.workers[0]}) was killed by {number.name}" in text
    assert ("out" in text and "memory" in text) == (number == signal.SIGKILL)


def test_only_the_first_failure_is_blamed(job):
    # The other worker exits by itself when it is asked to, and with another code.
    started = job("exit3 note")
    started.go()
    text = started.end(3)
    assert text.count("error: rank") == 1
    assert (started.folder / "signals-0").read_text() == f"{int(signal.SIGTERM)}\n"


def test_a_worker_that_ignores_sigterm(job):
    started = job("stubborn exit3")
    started.go()
    assert "rank 1" in started.end(3)


def test_grace_period(job):
    started = job("stubborn exit3", "--grace-period", "6")
    began = time.monotonic()
    started.go()
    assert "rank 1" in started.end(3)
    assert time.monotonic() - began > 6  # the default is 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("whole_group", [False, True])
def test_the_launcher_is_told_to_end(job, number, whole_group):
    started = job("wait")
    if whole_group:
        os.killpg(started.launcher.pid, number)
    else:
        os.kill(started.launcher.pid, number)
    text = started.end(128 + number)
    assert f"{number.name} received" in text
    assert "error: rank" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_get_the_signal_itself(job, number):
    started = job("note quit")
    os.kill(started.launcher.pid, number)
    started.end(128 + number)
    for rank in (0, 1):
        assert (started.folder / f"signals-{rank}").read_text() == f"{int(number)}\n"


def test_sigint_is_followed_by_sigterm(job):
    started = job("note")  # ends with SIGTERM only
    os.kill(started.launcher.pid, signal.SIGINT)
    started.end(128 + signal.SIGINT)
    assert (started.folder / "signals-0").read_text().split() == ["2", "15"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_that_ignore_everything(job, number):
    started = job("stubborn", "--grace-period", "1")
    os.kill(started.launcher.pid, number)
    started.end(128 + number)


def test_a_second_interrupt_kills_at_once(job):
    started = job("note", "--grace-period", "60")  # ends with SIGTERM only
    os.kill(started.launcher.pid, signal.SIGINT)
    wait_for(started.folder / "signals-0")
    time.sleep(2 * SAME_MOMENT)  # a second one within a moment would be the same Ctrl-C
    assert started.alive()
    os.kill(started.launcher.pid, signal.SIGINT)
    assert "SIGINT received again" in started.end(128 + signal.SIGINT)
    assert (started.folder / "signals-0").read_text() == "2\n"


def test_the_first_interrupt_after_a_failure_is_not_the_second(job):
    started = job("exit3 slow", "--grace-period", "60")
    started.go()
    wait_for(started.folder / "signals-0")
    time.sleep(2 * SAME_MOMENT)
    os.kill(started.launcher.pid, signal.SIGINT)
    time.sleep(0.5)
    assert started.workers[0] in started.alive()
    (started.folder / "release").touch()
    assert "error: rank 1" in started.end(3)


def test_a_signal_that_ends_a_worker_before_the_launcher_speaks(job):
    """The launcher is slow to look at the signal that everybody was sent; it is the cause all the same."""
    started = job("slow", "--grace-period", "60")
    os.kill(started.workers[1], signal.SIGINT)
    wait_for(started.folder / "signals-0")  # SIGTERM: the guardian takes it for a failure of rank 1
    os.kill(started.launcher.pid, signal.SIGINT)
    (started.folder / "release").touch()
    assert "error: rank" not in started.end(128 + signal.SIGINT)


def test_a_worker_that_ends_first_does_not_hurry_the_others(job):
    """Rank 1 dies of Ctrl-C before the launcher has told the guardian of it: rank 0 has its time all the same."""
    started = job("note 1wait", "--grace-period", "60")

    def state(pid):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    # The launcher wakes the guardian up when it runs again: that one sees both at one moment.
    for pid in (started.launcher.pid, started.guardian):
        os.kill(pid, signal.SIGSTOP)
        assert settled(lambda pid=pid: state(pid), "T", 60) == "T"
    os.kill(started.workers[1], signal.SIGINT)
    assert settled(lambda: state(started.workers[1]), "Z", 60) == "Z"
    os.kill(started.launcher.pid, signal.SIGINT)
    os.kill(started.launcher.pid, signal.SIGCONT)
    wait_for(started.folder / "signals-0")
    os.kill(started.workers[0], signal.SIGTERM)
    assert "error: rank" not in started.end(128 + signal.SIGINT)
    assert (started.folder / "signals-0").read_text().split() == ["2", "15"]  # the second one is ours


def test_the_grace_period_holds_for_what_is_below_a_worker(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import signal, sys, time\n"
        "def stop(*_):\n    time.sleep(2.5)\n    open('saved', 'w')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nopen('ready', 'w')\ntime.sleep(60)\n"
    )
    wrapper = ["sh", "-c", f'"{sys.executable}" slow.py; exit 0', "sh"]
    command = [*RUN, "--num_accelerators", "1", "--grace-period", "8", "--no_local_rank", "--no_python", *wrapper]
    with subprocess.Popen(command, cwd=tmp_path) as launcher:
        wait_for(tmp_path / "ready")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_ctrl_c_on_a_terminal_reaches_workers_once(job):
    terminal, other_end = pty.openpty()
    try:
        started = job("note quit", terminal=other_end)
        os.write(terminal, b"\x03")
        assert "error" not in started.end(128 + signal.SIGINT)
        for rank in (0, 1):
            assert (started.folder / f"signals-{rank}").read_text() == "2\n"
    finally:
        os.close(terminal)
        os.close(other_end)


def test_a_terminal_that_goes_away(job):
    """The kernel sends SIGHUP to the leader of the session only, which the launcher is here."""
    terminal, other_end = pty.openpty()
    try:
        started = job("note quit", terminal=other_end)
    finally:
        os.close(terminal)
        os.close(other_end)
    started.end(128 + signal.SIGHUP)
    for rank in (0, 1):
        assert (started.folder / f"signals-{rank}").read_text() == "1\n"


def test_ctrl_c_where_the_group_has_no_number(tmp_path):
    """In a PID namespace whose first process has its group outside: workers cannot be in the launcher's group."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    code = "import os; print(os.getpgrp())"
    probe = subprocess.run([*namespace, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if probe.returncode or probe.stdout != "0\n":
        pytest.skip(f"no such PID namespace here: {probe.stderr.strip() or probe.stdout}")
    (tmp_path / "worker.py").write_text(WORKER)
    command = [*RUN, "--num_accelerators", "2", "--no_local_rank", "worker.py", "note quit"]
    terminal, other_end = pty.openpty()
    try:
        with subprocess.Popen(
            [*namespace, *command],
            cwd=tmp_path,
            stdin=other_end,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(other_end, termios.TIOCSCTTY, 0),
        ):
            for rank in (0, 1):
                wait_for(tmp_path / f"ready-{rank}")
            os.write(terminal, b"\x03")
            for rank in (0, 1):
                wait_for(tmp_path / f"signals-{rank}")
    finally:
        os.close(terminal)
        os.close(other_end)
    assert [(tmp_path / f"signals-{rank}").read_text() for rank in (0, 1)] == ["2\n", "2\n"]


def test_a_signal_that_the_parent_ignores_stays_ignored(job):
    started = job("ok", prefix=("nohup",))
    os.kill(started.launcher.pid, signal.SIGHUP)
    for pid in started.workers:
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.2)
    assert started.launcher.poll() is None
    started.go()
    started.end(0)


@pytest.mark.parametrize("case", ["wait", "stubborn", "stubborn grandchild"])
def test_the_launcher_is_killed(job, case):
    started = job(case)
    os.kill(started.launcher.pid, signal.SIGKILL)
    started.end(-signal.SIGKILL)


def test_the_whole_group_is_killed(job):
    started = job("stubborn grandchild")
    os.killpg(started.launcher.pid, signal.SIGKILL)
    started.end(-signal.SIGKILL)


@pytest.mark.parametrize("case", ["wait", "stubborn grandchild"])
def test_the_guardian_is_killed(job, case):
    started = job(case)
    os.kill(started.guardian, signal.SIGKILL)
    text = started.end(128 + signal.SIGKILL)
    assert "error: the supervising process was killed by SIGKILL; 2 workers were ended" in text


def test_the_guardian_is_told_to_end(job):
    started = job("wait")
    os.kill(started.guardian, signal.SIGTERM)
    started.end(128 + signal.SIGTERM)


def test_grandchildren_of_workers_that_succeeded(job):
    started = job("ok grandchild")
    started.go()
    text = started.end(0)
    assert "ending what finished workers left behind: " in text
    assert text.count("import signal") == 2  # both are named


def test_grandchildren_of_a_worker_that_failed(job):
    started = job("exit3 grandchild", "--grace-period", "1")
    started.go()
    text = started.end(3)
    assert "ending what finished workers left behind: " in text
    assert "error: rank 1" in text


def test_a_helper_that_ends_by_itself_is_not_mentioned(tmp_path):
    """As the resource tracker of multiprocessing, which ends with the pipe that its parent held."""
    (tmp_path / "helper.py").write_text(
        "import os, subprocess\nsubprocess.Popen(['sh', '-c', 'cat; sleep 0.05'], stdin=subprocess.PIPE)\nos._exit(0)\n"
    )
    command = [*RUN, "--num_accelerators", "1", "helper.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_many_workers_for_the_limit_on_open_files(tmp_path):
    (tmp_path / "worker.py").write_text("import time; time.sleep(60)")
    command = [*RUN, "--num_accelerators", "60", "worker.py"]
    limited = ["sh", "-c", 'ulimit -n 40; exec "$0" "$@"', *command]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"anyaccel: error: rank \d+ of 60 workers cannot be started: Too many open files; "
        r"raise the limit on open files \(ulimit -n\), or start fewer workers",
        line,
    )


def test_no_more_processes(tmp_path):
    (tmp_path / "worker.py").write_text("import time; time.sleep(60)")
    code = """
import errno, os, sys
from anyaccel.cli import main
fork, left = os.fork, int(sys.argv[1])
def refuse():
    global left
    left -= 1
    if left < 0:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
sys.exit(main(["run", "--num_accelerators", "3", "worker.py"]))
"""

    def run(forks):
        command = [sys.executable, "-c", code, str(forks)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        return done.stderr.splitlines()

    assert run(2) == [
        "anyaccel: error: rank 1 of 3 workers cannot be started: Resource temporarily unavailable; "
        "raise the limit on processes (ulimit -u, or pids.max of the cgroup), or start fewer workers"
    ]
    assert run(0) == ["anyaccel: error: [Errno 11] Resource temporarily unavailable"]


def test_a_reader_that_does_not_read(tmp_path):
    """Somebody stopped reading standard error: the job ends all the same when it is told to."""
    (tmp_path / "flood.py").write_text("import sys\nopen('started', 'w')\nwhile True: sys.stderr.write('x' * 1000)\n")
    command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "2", "flood.py"]
    read_end, write_end = os.pipe()
    with subprocess.Popen(command, cwd=tmp_path, stderr=write_end) as launcher:
        os.close(write_end)
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # the pipe is full now
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 128 + signal.SIGTERM
    os.close(read_end)


def test_a_worker_decides_what_to_do_without_a_reader(tmp_path):
    """Its write fails, as it would without us; what is lost makes the exit code one of a failure."""
    (tmp_path / "talk.py").write_text(
        "import sys\ntry:\n while True: sys.stderr.write('x' * 1000)\nexcept BrokenPipeError:\n open('told', 'w')\n"
    )
    command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "1", "talk.py"]
    read_end, write_end = os.pipe()
    with subprocess.Popen(command, cwd=tmp_path, stderr=write_end) as launcher:
        os.close(write_end)
        os.read(read_end, 10)
        os.close(read_end)
        assert launcher.wait(60) == 1
    assert (tmp_path / "told").exists()


def test_the_end_of_a_long_tail_is_shown(tmp_path):
    (tmp_path / "tail.py").write_text(
        "import sys\nfor i in range(5000): print('line', i, 'é' * 20, file=sys.stderr)\nsys.exit(9)\n"
    )
    command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "1", "tail.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 9
    shown = [line for line in done.stderr.splitlines() if "  | " in line]
    assert [line.split()[3] for line in shown] == [str(i) for i in range(4980, 5000)]


def test_a_script_that_does_not_take_local_rank(tmp_path):
    (tmp_path / "strict.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "1", "strict.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("anyaccel: the script does not take --local_rank; start it with --no_local_rank\n")


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [("#!/no/such/interpreter\n", 127, "was not found"), ("not a program\n", 126, "cannot be started")],
)
def test_a_program_that_cannot_be_started(tmp_path, content, code, message):
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "anyaccel",
        "run",
        "--num_accelerators",
        "1",
        "--no_python",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_launch_from_a_program_that_has_children_of_its_own(tmp_path):
    """The Python interface: other children live on, signal handlers and the signal mask are put back."""
    code = """
import os, signal, subprocess, sys
from anyaccel.launch import LaunchOptions, launch_local, make_plan
other = subprocess.Popen(["sleep", "30"])
gone = subprocess.Popen(["true"])
options = LaunchOptions("unused", num_accelerators=2)
plan = make_plan(options, extra_env={"MINE": "yes"})
before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert launch_local(plan, ["sh", "-c", 'test "$MINE" = yes && exit $RANK'], grace_period=1) == 1
assert launch_local(plan, lambda binding: ["true"]) == 0
kill = "kill -9 $PPID; sleep 600"
assert launch_local(plan, ["sh", "-c", kill]) == 137
assert before == (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, []))
assert other.poll() is None and gone.wait() == 0
other.kill()
other.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_message_of_a_failure_waits_for_a_slow_reader(tmp_path):
    (tmp_path / "fail.py").write_text("import sys\nsys.stderr.write('x' * 300_000)\nsys.exit(4)\n")
    command = [sys.executable, "-m", "anyaccel", "run", "--num_accelerators", "1", "fail.py"]
    read_end, write_end = os.pipe()
    with subprocess.Popen(command, cwd=tmp_path, stderr=write_end) as launcher:
        os.close(write_end)
        time.sleep(1.0)
        assert launcher.poll() is None
        with open(read_end, "rb") as reader:
            assert b"error: rank 0" in reader.read()
        assert launcher.wait(60) == 4
