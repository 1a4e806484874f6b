# SPDX-License-Identifier: Apache-2.0
"""A wheel, installed where there is no compiler and no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WORK = """
import anyaccel, json, torch
from anyaccel.ops import in_tree
from anyaccel.ops.adam import CPUAdam
parameter = torch.nn.Parameter(torch.ones(3))
parameter.grad = torch.ones(3)
CPUAdam([parameter], lr=0.5).step()
print(json.dumps([anyaccel.__file__, str(in_tree.root()), parameter.tolist()]))
"""


def run(folder: Path, *command: str, **variables: str) -> str:
    """Without site-packages, whose editable install would come first; torch is taken from where it is."""
    path = os.pathsep.join([str(folder), str(Path(torch.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "ANYACCEL_CACHE_DIR": str(folder / "cache"), **variables}
    done = subprocess.run(
        [sys.executable, "-S", *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ops_of_a_wheel_need_no_compiler_and_can_be_built_from_what_it_brings(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path),
        "-Cbuild-dir=" + str(tmp_path / "build"),
    ]
    subprocess.run([*pip, *build, str(ROOT)], check=True, timeout=500)
    (wheel,) = tmp_path.glob("anyaccel-*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)

    file, sources, values = json.loads(run(installed, "-c", WORK, PATH=""))
    assert Path(file).is_relative_to(installed)
    assert Path(sources) == installed / "anyaccel" / "csrc"
    assert values == pytest.approx([0.5] * 3)
    listed = json.loads(run(installed, "-m", "anyaccel", "ops", "--json", PATH="", DS_ACCELERATOR="cpu"))["ops"]
    assert {row["op"] for row in listed if row["status"] == "prebuilt"} == {
        "async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam"
    }  # fmt: skip
    built = run(installed, "-m", "anyaccel", "ops", "build", "cpu_lion", "--jit", DS_ACCELERATOR="cpu")
    assert "cpu_lion: built in " in built
