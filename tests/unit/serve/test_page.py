# SPDX-License-Identifier: Apache-2.0
"""What the chat page keeps and says, in Node; tests/e2e/test_serve_clients.py uses all of it in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import anyaccel.serve

NODE = shutil.which("node")
STORE = Path(anyaccel.serve.__file__).parent / "page" / "store.js"
BROWSER = """
const kept = new Map(%s);
globalThis.localStorage = { getItem: (name) => kept.get(name) ?? null };
globalThis.sessionStorage = globalThis.localStorage;
"""


@pytest.mark.skipif(NODE is None, reason="no node")
@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, {}),
        ({"temperature": 0.7, "top_p": 1, "top_k": 0, "max_tokens": None, "seed": None, "theme": "dark"}, {}),
        ({"temperature": 0.5, "top_p": 1, "top_k": 40, "seed": 0}, {"temperature": 0.5, "top_k": 40, "seed": 0}),
        ({"temperature": 0.7, "top_p": 1, "top_k": 0, "version": 2}, {"temperature": 0.7, "top_p": 1, "top_k": 0}),
        ("broken", {}),
    ],
)
def test_only_what_somebody_has_set_is_said(kept: Any, said: dict[str, float]) -> None:
    """An earlier version kept a temperature and a top-p that it said unasked: those are nobody's."""
    pairs = [] if kept is None else [["anyaccel.settings", json.dumps(kept)]]
    program = BROWSER % json.dumps(pairs) + STORE.read_text() + "\nconsole.log(JSON.stringify(numbers()));"
    assert NODE is not None
    done = subprocess.run([NODE, "--input-type=module", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said
