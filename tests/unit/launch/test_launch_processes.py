# SPDX-License-Identifier: Apache-2.0
"""Finding and ending process trees, and writing to readers that do not read."""

import os
import signal
import subprocess
import sys

import pytest

from anyaccel.launch import processes
from anyaccel.launch.failure import Failure, Report
from anyaccel.launch.local.command import worker_command
from anyaccel.launch.local.launcher import check_script
from anyaccel.launch.output import Output
from anyaccel.launch.plan.options import LaunchOptions
from anyaccel.launch.plan.plan import RankBinding
from waiting import wait_for


@pytest.fixture
def sleeper():
    """A shell with a `sleep` below it."""
    process = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    below = int(process.stdout.readline())
    yield process, below
    for pid in (below, process.pid):
        processes.send([pid], signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_descendants_and_children(sleeper):
    process, below = sleeper
    assert {process.pid, below} <= set(processes.descendants())
    assert process.pid in processes.children()
    assert below not in processes.children()
    assert not {process.pid, below} & set(processes.descendants({process.pid}))


def test_describe(sleeper):
    _, below = sleeper
    # Between fork and exec it is still the shell, and then for a moment a program without arguments.
    wait_for(lambda: processes.describe([below]) == f"{below} (sleep 60)", "it is not described")
    assert processes.describe([]) == ""


def test_describe_is_short_printable_and_copes_with_what_is_gone():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "\n" * 5 + "x" * 200])
    try:
        text = processes.describe([process.pid])
    finally:
        process.kill()
        process.wait()
    assert len(text) < 90
    assert text.isprintable()
    assert processes.describe([process.pid]) == f"{process.pid} (gone)"


def test_end_all_leaves_excluded_children_alone(sleeper):
    process, below = sleeper
    before = processes.children()
    other = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        assert processes.end_all(before, 10) == set() or processes.descendants(before) == {}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        other.returncode = -9  # it was reaped by end_all
    assert process.poll() is None
    assert below in processes.descendants()


def test_output_reaches_a_slow_reader_and_does_not_wait_for_it():
    read_end, write_end = os.pipe()
    output = Output(write_end)
    data = bytes(range(256)) * 2000
    output.write(data)  # more than a pipe holds
    assert output.pending
    assert os.get_blocking(write_end)  # others write to it too
    got = b""
    while len(got) < len(data):
        got += os.read(read_end, 65536)
        output.flush()
    assert got == data
    assert not output.pending
    output.close(None)
    os.close(read_end)
    os.close(write_end)


def test_output_gives_up_in_time_and_on_a_reader_that_is_gone():
    read_end, write_end = os.pipe()
    output = Output(write_end)
    output.write(b"x" * 500_000)
    output.close(0.05)
    assert output.pending
    output = Output(write_end)
    output.write(b"x" * 500_000)
    os.close(read_end)
    output.flush()
    assert not output.pending
    output.write(b"more")
    assert not output.pending
    output.close(None)
    os.close(write_end)


def test_output_to_a_file_keeps_its_offset(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"before\n")
        file.flush()
        output = Output(file.fileno())
        output.line("hello")
        file.write(b"after\n")
    assert path.read_bytes() == b"before\nanyaccel: hello\nafter\n"


def test_report_round_trip():
    report = Report(Failure(1, 22, 9, 1.5, 3, ("a", "b")), 2, "5 (x)")
    assert Report.decode(report.encode()) == report
    assert Report.decode(Report().encode()) == Report()
    with pytest.raises((EOFError, ValueError, TypeError)):
        Report.decode(b"")


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({}, [sys.executable, "-u", "x", "--local_rank=1", "-a", "b c"]),
        ({"module": True}, [sys.executable, "-u", "-m", "x", "--local_rank=1", "-a", "b c"]),
        ({"local_rank_argument": False}, [sys.executable, "-u", "x", "-a", "b c"]),
        ({"no_python": True}, ["x", "--local_rank=1", "-a", "b c"]),
    ],
)
def test_local_command(options, command):
    binding = RankBinding(1, 1, (), "default", (), {})
    assert worker_command(LaunchOptions("x", ("-a", "b c"), **options), binding) == command


def test_check_script(tmp_path):
    program = tmp_path / "program"
    program.touch()
    check_script(LaunchOptions(str(program)), "")
    check_script(LaunchOptions("whatever.it.is", module=True), "")
    with pytest.raises(ValueError, match="not an executable file"):
        check_script(LaunchOptions(str(program), no_python=True), "")
    with pytest.raises(ValueError, match="not a program in PATH"):
        check_script(LaunchOptions("program", no_python=True), str(tmp_path))
    program.chmod(0o755)
    check_script(LaunchOptions("program", no_python=True), f"/nonexistent:{tmp_path}")
    with pytest.raises(ValueError, match=r"'nope.py' does not exist in"):
        check_script(LaunchOptions("nope.py"), "")
