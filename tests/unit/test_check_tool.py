# SPDX-License-Identifier: Apache-2.0
"""tools/check.py: which tests a change touches, and that its time is kept."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import check
from waiting import wait_for

TOOL = Path(__file__).parents[2] / "tools" / "check.py"
FILES = {
    "src/pack/__init__.py": "",
    "src/pack/low.py": "ONE = 1\n",
    "src/pack/high.py": "from pack.low import ONE\n",
    "src/pack/relative.py": "from . import low\n",
    "src/pack/other.py": "",
    "tests/helper.py": "import pack.other\n",
    "tests/unit/test_low.py": "def test_low():\n    from pack import low\n",
    "tests/unit/test_high.py": "import pack.high\n",
    "tests/unit/test_relative.py": "from pack.relative import low\n",
    "tests/unit/test_other.py": "from helper import pack\n",
    "tests/unit/test_native.py": "import anyaccel._llm\n",
    "tests/conftest.py": "",
    "tests/unit/test_gone.py": "from pack import gone\n",
    "tests/unit/test_data.py": "FILE = 'table.json'\n",
    "tests/e2e/test_slow.py": "import pack.low\n",
    "tests/data/table.json": "{}",
    "csrc/llm/kernel.cpp": "",
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool in a repository of its own, with everything committed."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    return check


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("src/pack/gone.py", [["test_gone"]]),
        (
            "tests/conftest.py",
            [["test_data", "test_gone", "test_high", "test_low", "test_native", "test_other", "test_relative"]],
        ),
        ("src/pack/low.py", [["test_low"], ["test_high", "test_relative"]]),
        ("src/pack/other.py", [["test_other"]]),
        ("tests/unit/test_high.py", [["test_high"]]),
        ("csrc/llm/kernel.cpp", [["test_native"]]),
        ("tests/data/table.json", [["test_data"]]),
        ("tests/e2e/test_slow.py", []),
    ],
)
def test_tests_by_their_distance(tool: ModuleType, tmp_path: Path, changed: str, expected: list[list[str]]) -> None:
    assert [[file.stem for file in files] for files in tool.touched_tests([tmp_path / changed])] == expected


def test_what_has_changed(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("")
    (tmp_path / "src/pack/low.py").write_text("ONE = 2\n")
    assert sorted(tool.changed_files(None)) == [tmp_path / "new.py", tmp_path / "src/pack/low.py"]
    for words in (["add", "-A"], ["commit", "-q", "-m", "two"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    assert sorted(tool.changed_files(None)) == [tmp_path / "new.py", tmp_path / "src/pack/low.py"]  # the last commit
    assert tool.changed_files("HEAD") == []
    with pytest.raises(SystemExit, match="check: git diff"):
        tool.changed_files("no-such-branch")


@pytest.mark.slow  # some seconds
def test_a_command_that_takes_too_long_is_ended_with_its_children(tool: ModuleType, tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 1000 & echo $! >child; wait"]
    assert tool.Commands(time.monotonic() + 5).run(command)[0] is None
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}")
    wait_for(lambda: not child.exists(), "the child goes on")
    assert tool.Commands(time.monotonic() + 60).run(["sh", "-c", "echo said; exit 3"]) == (3, "said\n")


def test_names_that_git_would_quote_and_files_that_are_gone(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests/unit/test_ü.py").write_text("import pack.low\n")
    (tmp_path / "src/pack/low.py").rename(tmp_path / "src/pack/moved.py")
    names = ["src/pack/low.py", "src/pack/moved.py", "tests/unit/test_ü.py"]
    changed = tool.changed_files(None)
    assert sorted(changed) == sorted(tmp_path / name for name in names)
    near = [file.stem for file in tool.touched_tests(changed)[0]]
    assert {"test_low", "test_ü"} <= set(near)


@pytest.mark.parametrize("content", [b"def broken(:\n", b"caf\xe9 = '\xe9'\n", b"\0\0"])
def test_a_changed_file_that_is_no_python_is_left_to_ruff(tool: ModuleType, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "src/pack/low.py"
    file.write_bytes(content)
    assert [each.stem for each in tool.touched_tests([file])[0]] == ["test_low"]
    assert [command[0].rpartition("/")[2] for command in tool.lint_commands([file])] == ["ruff", "ruff", "mypy"]


@pytest.mark.slow  # some seconds
def test_a_failure_counts_though_another_test_hangs(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import time\ndef test_fails():\n    assert 0, 'the reason'\ndef test_hangs():\n    time.sleep(1000)\n"
    (tmp_path / "tests/unit/test_new.py").write_text(text)
    assert tool.main(["--seconds", "60"]) == 1
    told = capsys.readouterr().out
    assert "the reason" in told and told.endswith("check: failed\n")


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The tool on itself, with a test that does not end."""
    for name in ("tools/check.py", "tests/unit/test_hangs.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(TOOL, tmp_path / "tools")
    mark = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + '!')"
    hangs = f"import os, time\ndef test_hangs():\n    {mark}\n    time.sleep(1000)\n"
    (tmp_path / "tests/unit/test_hangs.py").write_text(hangs)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"], cwd=tmp_path
    )
    command = [sys.executable, str(tmp_path / "tools/check.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        file = tmp_path / "pid"
        wait_for(lambda: file.exists() and file.read_text().endswith("!"), "the test does not start")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.endswith("check: interrupted\n")
    pid = file.read_text()[:-1]
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "pytest goes on")
