# SPDX-License-Identifier: Apache-2.0
"""tools/port_tests.py: what it compares of two runs, and that a run ends at its limit."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[3] / "tools"

# Stands for pytest: it leaves a process behind, and when it is interrupted it writes what it has, as pytest does.
STUCK = """#!/bin/sh
for word; do case "$word" in --junitxml=*) report="${word#--junitxml=}";; esac; done
write() {
  echo '<testsuite><testcase classname="a" name="quick"/></testsuite>' > "$report"
  exit 2
}
trap write INT
sleep 1000 &
echo $! > left
wait
wait
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.append(str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("port_tests_tool", TOOLS / "port_tests.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


def is_running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_does_not_end_is_interrupted_at_its_limit(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(STUCK)
    python.chmod(0o755)
    run = tool.outcomes(str(python), tmp_path, ["tests"], 2)
    assert not run.whole
    # A machine that needs longer than the limit to start a shell has no result to show.
    assert run.cases in ({"a::quick": "passed"}, {})
    assert f"{tmp_path}: interrupted at the limit of 2 s; {len(run.cases)} tests had ended" in capsys.readouterr().out
    if (tmp_path / "left").exists() and (number := (tmp_path / "left").read_text().strip()):
        stat = Path("/proc", number, "stat")
        deadline = time.monotonic() + 60  # what is killed may have to get a processor to end
        while is_running(stat):
            assert time.monotonic() < deadline, "its processes are left"
            time.sleep(0.01)


def test_only_what_ended_in_both_runs_is_compared(tool: ModuleType) -> None:
    before = tool.Run({"one": "passed", "two": "passed", "three": "failed", "four": "passed"}, True)
    cases = {"one": "passed", "two": "failed"}
    assert tool.lost(before, tool.Run(cases, True)) == {"two": "failed", "four": "gone"}
    assert tool.lost(before, tool.Run(cases, False)) == {"two": "failed"}
    assert tool.lost(before, tool.Run(before.cases, True)) == {}
