# SPDX-License-Identifier: Apache-2.0
"""What the chat page keeps and says, in Node; tests/e2e/test_serve_clients.py uses all of it in a browser."""

from __future__ import annotations

import json
import re
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


PAGE = STORE.parent


def run_module(program: str, given: Any = None) -> Any:
    """What a program in JavaScript prints: `PAGE` is the folder of the page's modules, `given` what it is given."""
    assert NODE is not None
    head = f"const PAGE = {json.dumps(PAGE.as_uri())};\nconst given = JSON.parse(process.argv[1]);\n"
    command = [NODE, "--input-type=module", "-e", head + program, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BRANCHES = """
const tree = await import(`${PAGE}/tree.js`);
const texts = (one) => tree.path(one).map((each) => each.content).join();
const mine = tree.create();
const question = tree.add(mine, null, { role: "user", content: "a" });
const first = tree.add(mine, question.id, { role: "assistant", content: "b" });
const theirs = tree.kept(mine);
// Here: another answer, and what follows it. There: the first answer changed later, and what follows that.
const second = tree.add(mine, question.id, { role: "assistant", content: "c" });
tree.add(mine, second.id, { role: "user", content: "d" });
Object.assign(theirs.messages[1], { content: "B", saved: Date.now() + 1000 });
tree.add(theirs, first.id, { role: "user", content: "e" });
Object.assign(theirs, { title: "t", changed: mine.changed + 1000 });
tree.merge(mine, theirs);
const shown = [texts(mine)];
tree.show(mine, first);
shown.push(texts(mine));
const versions = tree.versions(mine, second).map((each) => each.content);
// Below what is shown the other tab goes on: it is followed.
const again = tree.kept(mine);
tree.add(again, again.leaf, { role: "assistant", content: "f" });
tree.merge(mine, again);
shown.push(texts(mine));
// An answer of which nothing has come is not kept.
const waiting = tree.add(mine, mine.leaf, { role: "assistant", content: "" });
const kept = tree.kept(mine);
console.log(JSON.stringify([shown, versions, mine.title, texts(kept), kept.messages.length, mine.leaf === waiting.id]));
"""


@pytest.mark.skipif(NODE is None, reason="no node")
def test_branches_of_two_tabs_are_all_kept() -> None:
    shown, versions, title, kept, count, still = run_module(BRANCHES)
    assert shown == ["a,c,d", "a,B,e", "a,B,e,f"]
    assert versions == ["B", "c"] and title == "t"
    assert kept == "a,B,e,f" and count == 6 and still


@pytest.mark.skipif(NODE is None, reason="no node")
def test_what_is_no_conversation_is_left_alone_and_old_ones_are_understood() -> None:
    text = {"role": "user", "content": "x"}
    wrong = [
        None,
        {"role": "user"},
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "<b>", "content": "x"},
        "x",
    ]
    fields = {"reasoning": {}, "wrong": 5, "model": [], "finish": 5, "call": 5, "name": {}, "thought": "x"}
    lists = [{name: value} for name in ("files", "calls") for value in ("x", {}, [None], [{"name": "a"}])]
    stats = [{"stats": value} for value in ("x", 5, {"tokens": 5}, {"tokens": 5, "first": "x"})]
    wrong += [{**text, **each} for each in [*({name: value} for name, value in fields.items()), *lists, *stats]]
    given: list[Any] = [{"id": str(place), "messages": [text, each]} for place, each in enumerate(wrong)]
    given += [None, 5, {"id": 5, "messages": []}, {"id": "5"}]
    # A list without branches, of an earlier version; parents that lead nowhere, or in a circle; a leaf that is none.
    answer = {
        "role": "assistant",
        "content": "y",
        "coming": 5,
        "thought": None,
        "stats": {"tokens": 1, "first": 0.5, "rate": None},
    }
    given.append({"id": "old", "messages": [text, answer], "revision": "r"})
    circle = [{**text, "id": "a", "parent": "b"}, {**text, "id": "b", "parent": "a"}]
    given.append({"id": "circle", "messages": circle, "leaf": "c"})
    program = """
    const tree = await import(`${PAGE}/tree.js`);
    const found = given.map(tree.understood).filter(Boolean);
    console.log(JSON.stringify(found.map((each) => [each.id, tree.path(each).map((message) => message.content)])));
    """
    assert run_module(program, given) == [["old", ["x", "y"]], ["circle", ["x", "x"]]]


@pytest.mark.skipif(NODE is None, reason="no node")
def test_what_requests_and_exports_say_of_messages() -> None:
    program = """
    const tree = await import(`${PAGE}/tree.js`);
    const one = { ...tree.create(), title: "t", system: "be\\nkind" };
    const files = [{ name: "a.txt", text: "```x```" }];
    let last = tree.add(one, null, { role: "user", content: "look", files });
    const calls = [{ id: "c1", name: "f", text: '{"a": 1}' }];
    last = tree.add(one, last.id, { role: "assistant", content: "", reasoning: "hm", calls });
    tree.add(one, last.id, { role: "tool", call: "c1", name: "f", content: "7" });
    console.log(JSON.stringify([tree.path(one).map(tree.forRequest), tree.asMarkdown(one)]));
    """
    request, text = run_module(program)
    assert request == [
        {"role": "user", "content": "File: a.txt\n\n```x```\n\nlook"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    assert text == (
        "# t\n\n> be\n> kind\n\n## You\n\n**a.txt**\n\n````\n```x```\n````\n\nlook\n\n## Answer\n\n"
        '<details><summary>Reasoning</summary>\n\nhm\n\n</details>\n\nCall of `f`:\n\n```json\n{"a": 1}\n```\n\n'
        "## Result\n\n```\n7\n```\n"
    )


@pytest.mark.skipif(NODE is None, reason="no node")
def test_markdown_before_it_is_cleaned() -> None:
    """What is a formula, and what is money; tags that are let through, and others that stay text."""
    cases = {
        "US$5 and US$6, \\$5, $ a $ b": "<p>US$5 and US$6, $5, $ a $ b</p>",
        "$x_1*b*$ and \\(a<b\\)": '<p><span class="formula">x_1*b*</span> and <span class="formula">a&#60;b</span></p>',
        "so:\n$$\na\n\nb\n$$\nend": '<p>so:</p><p><span class="formula display">a\n\nb</span></p><p>end</p>',
        "\\[y\\] `$z$`": '<p><span class="formula display">y</span> <code>$z$</code></p>',
        "<script>x</script> a<br>b H<sub>2</sub>O": "<p>&#60;script&#62;x&#60;/script&#62; a<br>b H<sub>2</sub>O</p>",
        "<img src=x onerror=y> <b onclick=z>": "<p>&#60;img src=x onerror=y&#62; &#60;b onclick=z&#62;</p>",
        "![seen](https://a.b/c.png)": '<p><a href="https://a.b/c.png">seen</a></p>',
        "- [x] a\n": '<ul>\n<li><input type="checkbox" disabled aria-label="done" checked> a</li>\n</ul>',
    }
    program = """
    globalThis.document = {};
    const { html, pieces } = await import(`${PAGE}/markdown.js`);
    console.log(JSON.stringify(given.map((each) => html(pieces(each)))));
    """
    shown = run_module(program, list(cases))
    assert [re.sub(r"(</p>)\n", r"\1", each).strip() for each in shown] == list(cases.values())


@pytest.mark.skipif(NODE is None, reason="no node")
def test_functions_may_stand_alone() -> None:
    program = """
    globalThis.localStorage = globalThis.sessionStorage = { getItem: () => null };
    const { tools } = await import(`${PAGE}/store.js`);
    console.log(JSON.stringify(given.map(tools)));
    """
    one = {"type": "function", "function": {"name": "f"}}
    assert run_module(program, [" ", '{"name": "f"}', json.dumps([one, {"name": "f"}])]) == [[], [one], [one, one]]


def test_libraries_are_those_of_the_lock_file() -> None:
    """And are renewed by one command, with their licences."""
    root = Path(__file__).parents[3]
    wanted = json.loads((root / "tools/page_libraries/package.json").read_text())["dependencies"]
    locked = json.loads((root / "tools/page_libraries/package-lock.json").read_text())["packages"]
    licences = (PAGE / "vendor/LICENSES").read_text()
    for name, version in wanted.items():
        assert locked[f"node_modules/{name}"]["version"] == version
        assert f"{name} {version}\n" in licences
    katex = (PAGE / "vendor/katex.js").read_text()
    assert wanted["katex"] in katex
    sheet = (PAGE / "vendor/katex.css").read_text()
    fonts = set(re.findall(r"url\((.+?)\)", sheet))
    assert fonts == {f"fonts/{each.name}" for each in (PAGE / "vendor/fonts").iterdir()}
    assert sum(each.stat().st_size for each in PAGE.rglob("*") if each.is_file()) < 1_000_000


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
