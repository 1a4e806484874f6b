# SPDX-License-Identifier: Apache-2.0
"""A process that is killed while it saves: the old file is there, whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from anyaccel.io import load, save

SAVE = """
import sys, torch
from anyaccel.io import save
tensors = {"x": torch.ones(64 << 20)}
print("ready", flush=True)
while True:
    save(tensors, sys.argv[1])
    print("saved", flush=True)
"""


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.02, marks=pytest.mark.slow), pytest.param(0.1, marks=pytest.mark.slow), 0.3]
)
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_file(seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        file = Path(folder) / "m.safetensors"
        save({"x": torch.zeros(1000)}, file)
        with subprocess.Popen([sys.executable, "-c", SAVE, str(file)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
            saved = "saved" in process.stdout.read()
        found = load(file)["x"]
        assert found.numel() in ((1000, 64 << 20) if not saved else (64 << 20,))
        assert bool((found == (1 if found.numel() > 1000 else 0)).all())
        # What may be left beside it has a name of its own.
        assert all(path.name.endswith(".part") for path in Path(folder).iterdir() if path != file)
