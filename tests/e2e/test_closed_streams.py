# SPDX-License-Identifier: Apache-2.0
"""Standard streams that are closed or full: no result is lost in silence, no error is mixed with one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyaccel.cli import COMMANDS, main

WORKER = """
import os, sys
place = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
with open(f"seen-{os.environ['RANK']}", "w") as file:
    file.write(" ".join(place))
print("out")
print("err", file=sys.stderr)
"""


def command(
    redirection: str, *arguments: str, cwd: Path | None = None, unbuffered: bool = False
) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "anyaccel", *arguments]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    return subprocess.run(shell, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)


LOST = "error: standard output: No space left on device; output of the workers is lost"
CLOSED, FULL = (">&-", "it is closed"), (">/dev/full", "No space left on device")


@pytest.mark.parametrize(
    ("redirection", "reason", "arguments"),
    [(*stream, line) for stream in (CLOSED, FULL) for line in (["--version"], ["topo"], ["port", "--help"])]
    + [pytest.param(*FULL, ["ops", "--json"], marks=pytest.mark.slow)],  # once, since it takes seconds to import torch
)
def test_output_that_cannot_be_written_is_one_line_and_a_failure(redirection, reason, arguments):
    done = command(redirection, *arguments)
    said = f"anyaccel: error: standard output cannot be written ({reason})\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


# What is printed before an option is looked at, by argparse, in one piece and in many lines.
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["port", "--help"], ["run", "--help"], ["topo"]])
def test_unbuffered_output_that_cannot_be_written_is_the_same(arguments):
    done = command(">/dev/full", *arguments, unbuffered=True)
    said = "anyaccel: error: standard output cannot be written (No space left on device)\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)
    assert command("", *arguments, unbuffered=True).stdout == command("", *arguments).stdout != ""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("size", [8, 8192])
def test_help_of_every_command_that_cannot_be_written(command, size, monkeypatch, capsys):
    """In one process: the stream fails when its buffer is full, or when it is flushed."""
    with open("/dev/full", "wb", buffering=0) as full:
        stream = io.TextIOWrapper(io.BufferedWriter(full, size))
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr("anyaccel.cli.drop_output", lambda: None)
        monkeypatch.setattr("anyaccel.cli._streams.drop_output", lambda: None)
        try:
            code = main([command, "--help"])
        except SystemExit as leaving:
            code = leaving.code
        assert code == 1
        said = capsys.readouterr().err
        assert said == "anyaccel: error: standard output cannot be written (No space left on device)\n"
        with contextlib.suppress(OSError):
            stream.close()


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", [["run", "--help"], ["--help"]])
def test_a_reader_that_goes_away_ends_help_quietly(arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    done = subprocess.run(
        [sys.executable, "-m", "anyaccel", *arguments], stdout=writer, stderr=subprocess.PIPE, env=env, timeout=110
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param("2>/dev/full", marks=pytest.mark.slow)])
def test_a_closed_or_full_error_stream_takes_nothing_from_the_result(redirection, smollm2):
    options = ("generate", "Hi", "--model", str(smollm2), "--threads", "1", "--max-new-tokens", "2", "--seed", "0")
    plain, done = command("", *options), command(redirection, *options)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip() and "generated 2 tokens" in plain.stderr
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_an_error_does_not_go_to_the_output_when_the_error_stream_is_closed(redirection):
    done = command(redirection, "generate", "Hi", "--model", "/nonexistent")
    assert (done.returncode, done.stdout) == (2, "")
    done = command(redirection, "unknown")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_closed_input_is_an_empty_one(smollm2):
    done = command("<&-", "generate", "-", "--model", str(smollm2))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "the prompt is empty" in done.stderr
    done = command("<&-", "chat", "-q", "--model", str(smollm2))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_that_is_the_workers_own_fails_in_the_worker_alone():
    """What docs/launching.md says of one host: only what passes through the launcher is told by it."""
    job = ("run", "--num_accelerators", "1", "--no_local_rank", "--no_python")
    own = command(">/dev/full", *job, "sh", "-c", "echo lost 2>&-; exit 0")
    assert (own.returncode, own.stderr) == (0, "")
    passed_on = command(">/dev/full", *job[:1], "--rank-prefix", *job[1:], "sh", "-c", "echo lost 2>&-; exit 0")
    assert passed_on.returncode == 1
    assert LOST in passed_on.stderr


def test_output_is_lost_with_a_word_also_where_its_worker_has_ended_before_anybody_read_it(tmp_path):
    (tmp_path / "late.py").write_text(
        "import sys, time\n"
        "from anyaccel.cli import main\n"
        "from anyaccel.launch.local.guardian import _Guardian\n"
        "reap = _Guardian._reap\n"
        "_Guardian._reap = lambda self: (time.sleep(1), reap(self))\n"
        "sys.exit(main())\n"
    )
    words = ["run", "--num_accelerators", "1", "--rank-prefix", "--no_local_rank", "--no_python", "echo", "lost"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, tmp_path / "late.py", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=110
        )
    assert done.returncode == 1
    assert LOST in done.stderr


def test_workers_have_three_streams_whatever_was_closed(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    done = command("<&- >&- 2>&-", "run", "--num_accelerators", "2", "--no_local_rank", "worker.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for rank in range(2):
        place = (tmp_path / f"seen-{rank}").read_text().split()
        assert place[:2] == ["/dev/null", "/dev/null"]
        assert place[2].startswith("pipe:")  # the launcher's, which keeps the last lines of a failure
