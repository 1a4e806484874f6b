# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/device.py --speed` runs to its end, on a model that is too small to say anything of speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device.py"


@pytest.mark.slow
def test_every_contender_is_timed() -> None:
    pytest.importorskip("transformers")
    options = ["--speed", "tiny", "--dtype", "fp32", "--quantised", "int8", "int4", "--tokens", "3", "--json"]
    command = [sys.executable, str(SCRIPT), *options, "--batch", "1", "3", "--bandwidth", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    names = ["device fp32", "device int8", "device int4", "HF eager", "HF static", "HF compiled"]
    if "HF compiled does not run here" in done.stderr:  # torch.compile needs a C++ compiler
        names.pop()
    assert [(each["contender"], each["batch"]) for each in results] == [(name, n) for n in (1, 3) for name in names]
    # A step is the difference of two measurements, which on a busy machine may be anything.
    assert all(each["prompt tokens/s"] > 0 and "of bandwidth" in each for each in results)
