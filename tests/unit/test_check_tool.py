# SPDX-License-Identifier: Apache-2.0
"""tools/check.py: which tests a change touches, and that its time is kept."""

from __future__ import annotations

import importlib.util
import subprocess
import time
from pathlib import Path
from types import ModuleType

import pytest

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
    "tests/unit/test_data.py": "FILE = 'table.json'\n",
    "tests/e2e/test_slow.py": "import pack.low\n",
    "tests/data/table.json": "{}",
    "csrc/llm/kernel.cpp": "",
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool in a repository of its own, with everything committed."""
    spec = importlib.util.spec_from_file_location("check_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    return module


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
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


def test_a_command_that_takes_too_long_is_ended_with_its_children(tool: ModuleType, tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 1000 & echo $! >child; wait"]
    assert tool.run(command, time.monotonic() + 5)[0] is None
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}")
    wait_for(lambda: not child.exists(), "the child goes on")
    assert tool.run(["sh", "-c", "echo said; exit 3"], time.monotonic() + 60) == (3, "said\n")
