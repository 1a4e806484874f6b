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
# What each browser has kept -> what its requests say, as the page sees it: each in a module of its own, in one process.
PROGRAM = """
const [store, ...browsers] = JSON.parse(require("node:fs").readFileSync(0));
(async () => {
  for (const [place, kept] of browsers.entries()) {
    globalThis.localStorage = { getItem: (name) => (name === "anyaccel.settings" ? kept : null) };
    globalThis.sessionStorage = globalThis.localStorage;
    const text = encodeURIComponent(`${store}// ${place}`);
    console.log(JSON.stringify((await import(`data:text/javascript,${text}`)).numbers()));
  }
})();
"""


@pytest.mark.skipif(NODE is None, reason="no node")
def test_only_what_somebody_has_set_is_said() -> None:
    """An earlier version kept a temperature and a top-p that it said unasked: those are nobody's."""
    cases: list[tuple[Any, dict[str, float]]] = [
        (None, {}),
        ({"temperature": 0.7, "top_p": 1, "top_k": 0, "max_tokens": None, "seed": None, "theme": "dark"}, {}),
        ({"temperature": 0.5, "top_p": 1, "top_k": 40, "seed": 0}, {"temperature": 0.5, "top_k": 40, "seed": 0}),
        ({"temperature": 0.7, "top_p": 1, "top_k": 0, "version": 2}, {"temperature": 0.7, "top_p": 1, "top_k": 0}),
        ("broken", {}),
    ]
    given = json.dumps([STORE.read_text(), *(None if kept is None else json.dumps(kept) for kept, _ in cases)])
    assert NODE is not None
    done = subprocess.run([NODE, "-e", PROGRAM], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [said for _, said in cases]
