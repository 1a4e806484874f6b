# SPDX-License-Identifier: Apache-2.0
"""`anyaccel port` as a user runs it: scripts for CUDA, ported by --write alone, run on the CPU.

test_extension.py runs the same on the example device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "examples" / "porting"


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, text=True, capture_output=True, timeout=110)


@pytest.mark.timeout(300)
def test_cuda_scripts_run_on_the_cpu(tmp_path: Path) -> None:
    for script in SCRIPTS.glob("*_cuda.py"):
        shutil.copy(script, tmp_path)
    port = [sys.executable, "-m", "anyaccel", "port", "."]
    ported = command(*port[1:], "--write", cwd=tmp_path)
    assert (ported.returncode, ported.stderr) == (0, "")
    assert ported.stdout == "fixed 26 in 2 files, 0 left to you; 2 files\n"
    assert command(*port[1:], "--check", cwd=tmp_path).returncode == 0
    trained = command("train_cuda.py", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    losses = [float(line.split()[3]) for line in trained.stdout.splitlines() if line.startswith("step")]
    assert losses == pytest.approx([1.3558, 0.6263, 0.1510, 0.0192], abs=2e-3)
    answered = command("infer_cuda.py", cwd=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.startswith("4 classes, 256 of 256 right, mean loss 0.002")


def test_the_originals_need_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = command(str(SCRIPTS / "train_cuda.py"), cwd=tmp_path)
    assert done.returncode == 1
    assert "this script needs a GPU" in done.stderr
