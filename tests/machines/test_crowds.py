# SPDX-License-Identifier: Apache-2.0
"""As many threads and ranks as a machine with 64 CPUs has, and a model on them: none hangs, none collapses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from architecture import REPOSITORY
from binding import COMMAND, check, on
from machine import Machine


@pytest.fixture(scope="module")
def crowd() -> Path:
    """The program of tests/native/crowd_test.cpp."""
    caches = sorted(REPOSITORY.glob("build/*/CMakeCache.txt"), key=lambda path: path.stat().st_mtime)
    if not caches:
        pytest.skip("needs the folder that the native module was built in: make setup")
    folder = caches[-1].parent
    cmake = str(Path(sys.executable).parent / "cmake")
    for words in (["-DANYACCEL_TESTS=ON", str(folder)], ["--build", str(folder), "--target", "crowd_test"]):
        done = subprocess.run([cmake, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tests" / "native" / "crowd_test"


@on("many-cpus")
@pytest.mark.parametrize("threads", [64, 96])
def test_barriers_loops_and_collectives_of_many(machine: Machine, crowd: Path, threads: int) -> None:
    """With as many threads as CPUs, and with more. The emulated CPUs share a few real cores, so the limit is wide."""
    done = machine.check([crowd, str(threads), "0.5"], seconds=300)
    assert max(line["threads"] for line in done.json_lines()) == threads
    assert "all tests passed" in done.out


@on("many-cpus")
def test_a_rank_for_each_cpu(machine: Machine) -> None:
    planned = check(machine, ["--bind_cores_to_rank", "--num_accelerators", "64"], seconds=400)
    assert [rank["cores"] for rank in planned["ranks"]] == [[cpu] for cpu in range(64)]


@on("many-cpus")
def test_a_model_computes_with_64_threads(machine: Machine) -> None:
    words = [COMMAND, "generate", "The history", "--json", "-q", "--max-new-tokens", "2"]
    few = machine.check(["taskset", "-c", "0,1", *words, "--threads", "2"], seconds=240)
    many = machine.check([*words, "--threads", "64"], seconds=400)
    assert json.loads(many.out)["tokens"] == json.loads(few.out)["tokens"]
