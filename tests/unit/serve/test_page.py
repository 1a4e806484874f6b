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


# A tab with a browser that has room for `room` characters; `other` is what another tab does.
TAB = """
const kept = new Map(Object.entries(JSON.parse(process.argv[2])));
globalThis.localStorage = new Proxy({}, {
  ownKeys: () => [...kept.keys()],
  getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }),
  get: (_, name) => ({
    getItem: (key) => kept.get(key) ?? null,
    removeItem: (key) => kept.delete(key),
    setItem(key, value) {
      if (value.length > globalThis.room) throw new Error("full");
      kept.set(key, value);
    },
  })[name],
});
globalThis.sessionStorage = globalThis.localStorage;
let storage;
globalThis.addEventListener = (_, told) => (storage = told);
globalThis.room = Infinity;
globalThis.other = (key, value) => {
  kept.set(key, JSON.stringify(value));
  storage({ key });
};
globalThis.stored = () => [...kept.values()].map((each) => JSON.parse(each));
"""
FULL = """
const page = await import("./conversations.js");
const texts = (one) => one.messages.map((each) => each.content).join();
const mine = { ...page.create(), title: "t" };
const say = (content) => {
  mine.messages.push({ role: "user", content });
  page.keep(mine);
};
say("a");
room = 0;
say("b");
say("c");
const alone = page.all().map((each) => [each.title, texts(each)]);
const [theirs] = stored();
theirs.messages.push({ role: "user", content: "d" });
other("anyaccel.conversation." + mine.id, { ...theirs, revision: "other" });
const after = texts(mine);
room = Infinity;
say("e");
console.log(JSON.stringify([alone, after, stored().map((each) => [each.title, texts(each)]), page.isUnsaved()]));
"""


def run_tab(folder: Path, program: str, kept: dict[str, Any]) -> Any:
    """What a tab's program says, with what the browser has kept before."""
    assert NODE is not None
    for name in ("store.js", "conversations.js"):
        shutil.copy(STORE.parent / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "tab.js").write_text(TAB + program)
    command = [NODE, str(folder / "tab.js"), json.dumps({name: json.dumps(value) for name, value in kept.items()})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="no node")
def test_what_a_full_browser_does_not_keep_stays_as_it_is(tmp_path: Path) -> None:
    """It is no copy unless another tab changes the conversation, and what that tab keeps does not replace it."""
    alone, after, stored, is_unsaved = run_tab(tmp_path, FULL, {})
    assert alone == [["t", "a,b,c"]]
    assert after == "a,b,c"
    assert sorted(stored) == [["t", "a,d"], ["t (2)", "a,b,c,e"]] and not is_unsaved


@pytest.mark.skipif(NODE is None, reason="no node")
def test_what_is_no_conversation_is_left_alone(tmp_path: Path) -> None:
    text = {"role": "user", "content": "x"}
    result = [None, {"role": "user"}, {"content": "x"}, {"role": "user", "content": 5}, "x"]
    kept = {
        f"anyaccel.conversation.{place}": {"id": str(place), "messages": [text, each]}
        for place, each in enumerate(result)
    }
    kept["anyaccel.conversation.good"] = {"id": "good", "messages": [text]}
    program = 'const page = await import("./conversations.js");\n'
    program += "console.log(JSON.stringify([page.all().map((each) => each.id), stored().length]));"
    assert run_tab(tmp_path, program, kept) == [["good"], len(kept)]


@pytest.mark.skipif(NODE is None, reason="no node")
def test_only_what_somebody_has_set_is_said() -> None:
    cases: list[tuple[Any, dict[str, float]]] = [
        (None, {}),
        ({"max_tokens": None, "seed": None, "theme": "dark"}, {}),
        (
            {"temperature": 0.7, "top_p": 1, "top_k": 0, "seed": 0},
            {"temperature": 0.7, "top_p": 1, "top_k": 0, "seed": 0},
        ),
        ("broken", {}),
    ]
    given = json.dumps([STORE.read_text(), *(None if kept is None else json.dumps(kept) for kept, _ in cases)])
    assert NODE is not None
    done = subprocess.run([NODE, "-e", PROGRAM], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [said for _, said in cases]
