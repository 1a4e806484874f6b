# SPDX-License-Identifier: Apache-2.0
"""What can only be seen in another process: devices that are hidden, and a process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anyaccel.accelerator.base import Accelerator
from anyaccel.accelerator.conformance.checking import (
    ConformanceError,
    UncheckedError,
    check,
    expect,
    expect_equal,
    expect_type,
)

# A driver, or a library of collectives, may take tens of seconds to start.
DEADLINE_S = 120.0

_COUNT = """
kind = importlib.import_module(asked["module"])
for name in asked["class"].split("."):
    kind = getattr(kind, name)
answer = kind().device_count()
"""

_ALL_REDUCE = """
import socket
import torch
for name in asked["packages"]:
    importlib.import_module(name)
if any(name == "lo" for _, name in socket.if_nameindex()):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: the loopback is enough
store = torch.distributed.FileStore(asked["store"], 1)
torch.distributed.init_process_group(asked["backend"], store=store, rank=0, world_size=1)
tensor = torch.arange(8.0, device=asked["device"])
torch.distributed.all_reduce(tensor)
answer = tensor.tolist()
torch.distributed.destroy_process_group()
"""


def _ask_child(code: str, asked: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """Run `code` in another process: it has `asked` and sets `answer`."""
    script = f"import importlib, json, os, sys\nasked = json.loads(sys.argv[1])\n{code}\nprint(json.dumps(answer))"
    # Extensions may be on a path that only this process knows, as in a test.
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps(asked)],
            env={**os.environ, **environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise ConformanceError(f"expected an answer of a child process within {DEADLINE_S:g} s, got none") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConformanceError(f"expected a child process to end well, got exit code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])  # drivers may print before that


@check("processes", "visible_devices_envs", "set_visible_devices_envs", "device_count")
def check_a_child_sees_just_the_devices_it_is_given(accelerator: Accelerator) -> None:
    """One device of several."""
    kind = type(accelerator)
    if not accelerator.visible_devices_envs():
        raise UncheckedError("no variable narrows the devices of a process")
    if accelerator.device_count() < 2:
        raise UncheckedError("there is only one device, so none can be hidden")
    if "<" in kind.__qualname__ or kind.__module__ == "__main__":
        raise UncheckedError(f"another process cannot import {kind.__module__}.{kind.__qualname__}")
    # Where this process already sees a part of the devices, a child's are a part of these.
    already = os.environ.get(accelerator.visible_devices_envs()[0], "")
    environment: dict[str, str] = {}
    accelerator.set_visible_devices_envs(environment, [already.split(",")[0] if already else 0])
    count = _ask_child(_COUNT, {"module": kind.__module__, "class": kind.__qualname__}, environment)
    expect_equal(f"device_count() of a child with {environment}", count, 1)


@check("processes", "communication_backend_name")
def check_a_process_group_reduces_a_tensor(accelerator: Accelerator) -> str:
    """torch.distributed takes the name and reduces a tensor of the device, in a group of one."""
    backend = accelerator.communication_backend_name()
    expect_type("communication_backend_name()", backend, str)
    expect(backend, "communication_backend_name() not empty", backend)
    package = next((item.package for item in accelerator.spec.collectives if item.name == backend), "")
    with tempfile.TemporaryDirectory(prefix="anyaccel-conformance-") as folder:
        asked = {
            "packages": [name for name in (accelerator.spec.package, package) if name],
            "backend": backend,
            "device": accelerator.current_device_name(),
            "store": str(Path(folder) / "store"),
        }
        values = _ask_child(_ALL_REDUCE, asked, {})
    expect_equal(f"all_reduce with {backend} in a group of one to give", values, torch.arange(8.0).tolist())
    return backend
