# SPDX-License-Identifier: Apache-2.0
"""benchmarks/device_all.py: what it has measured is kept and not measured again, and it ends when its time does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "device_all.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.slow
def test_all_stages_run_on_a_cpu_and_are_not_run_again(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    options = ("--sizes", "tiny", "--record", str(record))
    done = run(*options)
    assert done.returncode == 0, done.stderr
    found = lines(record)
    stages = {each["stage"]: each for each in found if "stage" in each}
    assert set(stages) == {"machine", "conformance", "tests/gpu", "speed tiny", "serve", "ported"}
    assert "fail" not in stages["conformance"] and stages["ported"]["same"] and not stages["serve"]["failed"]
    measured = {(each["contender"], each["batch"], each["prompt"]) for each in found if "contender" in each}
    for form in ("bf16", "int8", "int4"):
        assert {(f"device {form}", 1, 128), (f"device {form}", 8, 128), (f"device {form}", 1, 64)} <= measured
    again = run(*options)
    assert again.returncode == 0 and lines(record) == found


def test_without_time_nothing_is_begun(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    done = run("--minutes", "0", "--record", str(record))
    assert done.returncode == 1 and "no time left; run this again to go on" in done.stderr
    assert [each["stage"] for each in lines(record)] == ["machine"]
