# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own tests: what tools/deepspeed_tests.py compares, and that ours passes what theirs passes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from generators import training

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deepspeed_tests", ROOT / "tools" / "deepspeed_tests.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_whatever_passes_on_deepspeeds_side_passes_on_ours(tool: ModuleType) -> None:
    files = json.loads(training.TESTS.read_text())["files"]
    assert files.keys() <= set(tool.TESTS)
    assert any(tests["both passed"] for tests in files.values())
    assert [test for tests in files.values() for test in tests["only theirs"]] == []
    assert sum(len(tests["both passed"]) for tests in files.values()) >= 300


def test_only_what_ended_on_both_sides_is_compared(tool: ModuleType) -> None:
    theirs = {
        "a": "passed",
        "b": "passed",
        "c": "failed",
        "d": "skipped",
        "e": "passed",
        "f": "waits",
        "g": "passed",
        "h": "passed",
    }
    ours = {"a": "passed", "b": "failed", "c": "passed", "d": "skipped", "e": "runs", "f": "passed", "h": "hung"}
    assert tool.row(ours, theirs) == {
        "both failed": [], "both passed": ["a"], "both skipped": ["d"], "only theirs": ["b"], "only ours": ["c"],
        "hung": ["h"],
    }  # fmt: skip


def test_every_copied_file_begins_with_our_parts(tool: ModuleType, tmp_path: Path) -> None:
    unit = tmp_path / "checkout" / "tests" / "unit"
    unit.mkdir(parents=True)
    for name in ("conftest.py", "pytest.ini"):
        (unit.parent / name).write_text("")
    (unit / "test_some.py").write_text('"""Some."""\nfrom __future__ import annotations\n\nimport os\n\nPORT = 29500\n')
    (unit / "test_none.py").write_text("PORT = 1\n")
    tests = tool.copied(tmp_path / "checkout", tmp_path, "ours") / "unit"
    assert (tests / "test_some.py").read_text() == (
        f'"""Some."""\nfrom __future__ import annotations\n\n{tool.OURS}import os\n\nPORT = {tool.PORTS["ours"]}\n'
    )
    assert (tests / "test_none.py").read_text() == "PORT = 1\n"


# Three tests, of which the second ends pytest as DeepSpeed's harness does when a test hangs.
HANGS = """
import pytest

def test_one():
    pass

def test_two():
    pytest.exit("Test hanged, exiting", returncode=1)

def test_three():
    pass
"""


def test_after_a_test_that_hangs_the_others_run(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "ours" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_some.py").write_text(HANGS)
    (tests.parent / "preloaded.py").write_text(tool.PRELOADED)
    assert tool.run(tests, "test_some.py", 100) == {"test_one": "passed", "test_two": "hung", "test_three": "passed"}
    assert "'passed': 2" in capsys.readouterr().out
