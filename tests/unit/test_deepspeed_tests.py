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
LACKING = ["test_zenflow_adam_cross_process"]  # skips itself on ours: our Adam op has no ZenFlow step


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
    assert [test for tests in files.values() for test in tests["only theirs"]] == LACKING


def test_only_what_ended_on_both_sides_is_compared(tool: ModuleType) -> None:
    theirs = {"a": "passed", "b": "passed", "c": "failed", "d": "skipped", "e": "passed", "f": "waits", "g": "passed"}
    ours = {"a": "passed", "b": "failed", "c": "passed", "d": "skipped", "e": "runs", "f": "passed"}
    assert tool.row(ours, theirs) == {
        "both failed": [], "both passed": ["a"], "both skipped": ["d"], "only theirs": ["b"], "only ours": ["c"],
    }  # fmt: skip


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


def test_a_test_that_hangs_has_failed_and_the_others_run(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "ours" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_some.py").write_text(HANGS)
    (tests.parent / "preloaded.py").write_text(tool.PRELOADED)
    assert tool.run(tests, "test_some.py", 100) == {"test_one": "passed", "test_two": "failed", "test_three": "passed"}
    assert "'passed': 2" in capsys.readouterr().out
