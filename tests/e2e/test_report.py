# SPDX-License-Identifier: Apache-2.0
"""`anyaccel report` as a user runs it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anyaccel
from anyaccel.vendors import VENDORS
from warm import WarmPython


def _environment(**changes: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "LOCAL_SIZE")}
    path = [str(Path(anyaccel.__file__).parents[1]), env.get("PYTHONPATH", "")]
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, path)), **changes}


Report = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    with WarmPython(_environment(), tmp_path_factory.mktemp("warm")) as warm:
        yield functools.partial(warm.run, "-m", "anyaccel", "report")


def test_text_and_choice(report: Report) -> None:
    done = report(DS_ACCELERATOR="cpu")
    assert (done.returncode, done.stderr) == (0, "")
    titles = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles == ["versions", "accelerator", "cpu", "topology"]
    assert "chosen       cpu: DS_ACCELERATOR=cpu is set" in done.stdout


def test_json_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "anyaccel", "report", "--json", "--no-torch"]
    done = subprocess.run(command, env=_environment(), text=True, capture_output=True, timeout=100)
    assert done.returncode == 0
    assert json.loads(done.stdout)["accelerator"] is None
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "anyaccel.report.collect" in imported
    assert not {"torch", "transformers", "numpy"} & imported


def test_an_unknown_accelerator_exits_with_1_and_says_why(report: Report) -> None:
    done = report("--json", DS_ACCELERATOR="warp")
    assert (done.returncode, done.stderr) == (1, "")
    accelerator = json.loads(done.stdout)["accelerator"]
    assert accelerator["name"] is None
    known = sorted({*VENDORS, *(name for vendor in VENDORS.values() for name in vendor.backends)})
    assert accelerator["error"] == f"DS_ACCELERATOR='warp' is not known; known accelerators: {', '.join(known)}"


def test_a_bad_flag_is_one_line_and_exit_code_2(report: Report) -> None:
    done = report("--jsn")
    assert (done.returncode, done.stdout) == (2, "")
    said = "unrecognized arguments: --jsn (did you mean --json?); see anyaccel report --help"
    assert done.stderr == f"anyaccel: error: {said}\n"
    assert report("--no_torch").returncode == 0
