# SPDX-License-Identifier: Apache-2.0
"""The command `anyaccel serve` as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any


class Serving:
    """The command, once it says that it serves.

    Attributes:
        said: its lines up to there.
        url: where it is.
    """

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "anyaccel", "serve", "--port", "0", "--log-level", "warning", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line.rstrip("\n"))
            if line.startswith("try: "):
                break
        else:
            raise AssertionError("\n".join(self.said))
        self.url = next(line for line in self.said if line.startswith("serving: ")).split()[1].partition("/v1")[0]

    def post(self, path: str, value: dict[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(value).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def end(self) -> str:
        """Stop it as a supervisor does; what it said at its end."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=120)
        return rest
