# SPDX-License-Identifier: Apache-2.0
"""Runs what the tests ask for on the machine that it was booted on: a line of JSON each way, over a serial port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

_lock = threading.Lock()


def _port() -> str:
    for name in Path("/sys/class/virtio-ports").glob("*/name"):
        if name.read_text().strip() == "agent":
            return f"/dev/{name.parent.name}"
    raise SystemExit("there is no port of the agent's name")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    child = subprocess.Popen(
        request["command"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **request["env"]},
        cwd=request["folder"],
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=request["seconds"])
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        return {"status": None, "out": out, "err": err}
    return {"status": child.returncode, "out": out, "err": err}


def _answer(port: Any, request: dict[str, Any]) -> None:
    try:
        answer = _run(request)
    except OSError as error:
        answer = {"status": 127, "out": "", "err": str(error)}
    line = json.dumps({"number": request["number"], **answer}).encode() + b"\n"
    with _lock:
        while line:  # the port takes a part of a long line
            line = line[port.write(line) :]


def main() -> None:
    with open(_port(), "r+b", buffering=0) as port:
        port.write(b'{"ready": true}\n')
        for line in port:
            threading.Thread(target=_answer, args=(port, json.loads(line)), daemon=True).start()


if __name__ == "__main__":
    main()
