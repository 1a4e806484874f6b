# SPDX-License-Identifier: Apache-2.0
"""Named pipes and devices where a file is wanted: an error at once; they would be waited for, or have no end."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from anyaccel.bench import report
from anyaccel.cli import main
from anyaccel.errors import AnyAccelError
from anyaccel.launch.local.command import in_venv
from anyaccel.validation import create_file, open_file
from sysfs_trees import MACHINES, build


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_only_a_file_is_opened_to_read(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_file(tmp_path / "link") as file:
        assert file.read() == b"content"
    for path, said in ((pipe, "it is a pipe"), (Path("/dev/zero"), "it is a device"), (tmp_path, "Is a directory")):
        with pytest.raises(OSError, match=said):
            open_file(path)


def test_a_pipe_is_written_to_where_somebody_reads_it(pipe: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a pipe or socket that nobody reads"):
        create_file(pipe)
    content = os.urandom(1 << 17)  # more than a pipe holds
    found: list[bytes] = []
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    with create_file(pipe) as file, os.fdopen(reader, "rb") as opened:
        thread = threading.Thread(target=lambda: found.append(opened.read(len(content))))
        thread.start()
        file.write(content)
        file.flush()
        thread.join()
    assert found == [content]
    (tmp_path / "file").write_bytes(b"what was there before")
    with create_file(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


# Options of commands that name a file: "PIPE" in them is one that nobody writes to, or reads.
COMMANDS = {
    "hostfile": ["run", "--hostfile", "PIPE", "--dry-run", "x.py"],
    "svg": ["topo", "--svg", "PIPE"],
    "port": ["port", "PIPE"],
    "model": ["generate", "--model", "PIPE", "text"],
    "quantize": ["quantize", "PIPE", "TMP/copy"],
    "logs": ["run", "--enable_each_rank_log", "PIPE", "--num_accelerators", "1", "--no_python", "true"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_given_a_pipe_says_so(
    command: str, pipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [word.replace("PIPE", str(pipe)).replace("TMP", str(tmp_path)) for word in COMMANDS[command]]
    assert main(arguments) in (1, 2)
    error = capfd.readouterr().err
    assert str(pipe) in error
    assert ("a pipe or device, neither a model" in error) == (command in ("model", "quantize"))
    assert "Traceback" not in error
    assert pipe.is_fifo()


@pytest.mark.many_files
@pytest.mark.parametrize(
    "name", ["sys/devices/system/cpu/online", "proc/cpuinfo", "sys/devices/system/node/node0/meminfo"]
)
def test_a_pipe_in_a_recorded_machine(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(MACHINES["two sockets"], tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert main(["topo", "--sysfs-root", str(tmp_path)]) == 2
    assert f"{str(tmp_path / name)!r} is a pipe, and no file of a machine" in capsys.readouterr().err
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    main(["topo", "--sysfs-root", str(tmp_path)])  # a file that a container masks is missing; this one has no end


def test_a_picture_of_measurements_is_no_pipe(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(AnyAccelError, match="it is there, and is no file"):
        report.check_plot(str(pipe))


def test_a_script_to_be_sourced_is_no_pipe(pipe: Path) -> None:
    done = subprocess.run([*in_venv(str(pipe)), "true"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"anyaccel: error: --venv_script {pipe} is a pipe; give a file\n"
