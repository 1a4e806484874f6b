# SPDX-License-Identifier: Apache-2.0
"""Uses the chat page in a real Chromium: `python page.py URL URL_WITH_KEY [FOLDER]`; the folder gets screenshots.

Needs playwright; run by tests/e2e/test_serve_clients.py with the Python of .venv-clients.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Error, Page, expect, sync_playwright

FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else None
TIMEOUT = 60_000  # milliseconds
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def answered(page: Page, count: int) -> Any:
    """The last answer, once it is complete and the page shows so many messages."""
    expect(page.locator("article")).to_have_count(count)
    last = page.locator("article").last
    expect(last.locator(".speed")).to_contain_text("first after")
    expect(page.locator("#stop")).to_be_hidden()
    return last.locator(".body")


def converse(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model")).to_have_value("fake")
    say(page, "hello")
    expect(answered(page, 2)).to_have_text("You said: hello")
    expect(page.locator(".speed")).to_contain_text("tokens/s")

    page.click("text=Regenerate")
    expect(answered(page, 2)).to_have_text("You said: hello")
    expect(page.locator("article.assistant .versions")).to_contain_text("2/2")

    page.locator("article.user >> text=Edit").click()
    page.fill("article.edit textarea", "edited")
    color = "e => getComputedStyle(e).color"
    assert page.locator("article.edit .primary").evaluate(color) == page.locator("#send").evaluate(color)
    page.locator("article.edit >> text=Send").click()
    expect(answered(page, 2)).to_have_text("You said: edited")
    expect(page.locator("article.user .body")).to_have_text("edited")

    # Both branches stay, also after a reload.
    page.get_by_role("button", name="Previous version").first.click()
    expect(page.locator("article.user .body")).to_have_text("hello")
    expect(page.locator("article.assistant .versions")).to_contain_text("2/2")
    page.get_by_role("button", name="Next version").first.click()
    expect(page.locator("article.user .body")).to_have_text("edited")

    say(page, "forever")  # it would not end by itself
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("article")).to_have_count(4)
    page.locator("article").last.locator("text=Y").wait_for()
    page.locator("article.user").last.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    page.fill("article.edit textarea", "half a thought")
    page.click("#stop")
    expect(page.locator("article").last.locator(".speed")).to_contain_text("stopped")
    expect(page.locator("article.edit textarea")).to_have_value("half a thought")  # the end of an answer leaves it
    page.locator("article.edit >> text=Cancel").click()
    expect(page.locator("article.user .body").first).to_have_text("edited")
    say(page, "again")
    expect(answered(page, 6)).to_have_text("You said: again")
    # An answer that somebody corrects is a version, and nothing is generated.
    page.locator("article.assistant").last.get_by_role("button", name="Edit").click()
    page.fill("article.edit textarea", "corrected")
    page.locator("article.edit >> text=Save").click()
    expect(page.locator("article .body").last).to_have_text("corrected")

    page.reload()
    expect(page.locator("article")).to_have_count(6)  # kept by the browser
    expect(page.locator("article .body").last).to_have_text("corrected")
    expect(page.locator("article.user .versions").first).to_contain_text("2/2")
    expect(page.locator("#list .entry")).to_have_count(1)


def continuing(page: Page) -> None:
    """An answer that was cut goes on as the same message."""
    page.click("#new")
    page.click("#open-settings")
    page.fill("#max_tokens", "9")
    page.press("#max_tokens", "Tab")
    say(page, "long")
    expect(answered(page, 2)).to_have_text("You said:")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    body = sent.value.post_data_json
    assert body["continue_final_message"] and not body["add_generation_prompt"]
    assert body["messages"][-1] == {"role": "assistant", "content": "You said:"}
    expect(answered(page, 2)).to_have_text("You said:You said:")
    page.fill("#max_tokens", "")
    page.press("#max_tokens", "Tab")
    page.click("#open-settings")


def functions(page: Page) -> None:
    """Calls of functions are folded, and take their results."""
    page.click("#new")
    page.click("#open-settings")
    page.fill("#tools", "[{")
    page.press("#tools", "Tab")
    expect(page.locator("#tools-wrong")).to_contain_text("no JSON")
    page.fill("#tools", json.dumps([{"name": "weather", "parameters": {"type": "object"}}]))
    page.press("#tools", "Tab")
    expect(page.locator("#tools-wrong")).to_be_hidden()
    page.click("#open-settings")
    say(page, "weather")
    call = answered(page, 2).locator("details.call")
    expect(call).to_contain_text("Call of weather")
    expect(call.locator("pre")).to_be_hidden()
    call.locator("summary").click()
    expect(call.locator("pre")).to_contain_text('"city": "Paris"')
    call.get_by_label("Result of weather").fill("sunny")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send results").click()
    messages = sent.value.post_data_json["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
    assert messages[2]["content"] == "sunny"
    expect(answered(page, 4)).to_contain_text("You said: weather")
    expect(page.locator("article.tool pre")).to_be_hidden()
    page.reload()
    expect(page.locator("article.tool summary")).to_have_text("Result of weather")
    page.click("#open-settings")
    page.fill("#tools", "")
    page.press("#tools", "Tab")
    page.click("#open-settings")


def attachments(page: Page) -> None:
    """Files of text are part of the message; others are refused."""
    page.click("#new")
    with page.expect_file_chooser() as choosing:
        page.get_by_role("button", name="Attach text files").click()
    refused: list[str] = []
    page.once("dialog", lambda dialog: (refused.append(dialog.message), dialog.accept()))
    text = {"name": "notes.txt", "mimeType": "text/plain", "buffer": "größer\n".encode()}
    picture = {"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00\xff"}
    choosing.value.set_files([text, picture])  # type: ignore[arg-type]
    expect(page.locator("#files")).to_contain_text("notes.txt")
    expect(page.locator("#files")).not_to_contain_text("a.png")
    assert refused == ["Not attached: a.png: it is no text in UTF-8"]
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "what is it?")
    assert sent.value.post_data_json["messages"] == [
        {"role": "user", "content": "File: notes.txt\n\ngrößer\n\n\nwhat is it?"}
    ]
    answered(page, 2)
    expect(page.locator("#files")).to_be_empty()
    page.reload()
    page.locator("details.file summary").click()
    expect(page.locator("details.file pre")).to_have_text("größer\n")


def exported(page: Page) -> None:
    """What is exported can be read, and imported again."""
    page.click("#new")
    say(page, "hello")
    answered(page, 2)

    def saved(name: str) -> str:
        page.locator("#export summary").click()
        with page.expect_download() as loading:
            page.get_by_role("button", name=name).click()
        return Path(loading.value.path()).read_text()

    assert saved("This one as Markdown") == "# hello\n\n## You\n\nhello\n\n## Answer\n\nYou said: hello\n"
    said: list[str] = []
    count = page.locator("#list .entry").count()
    everything = saved("All as JSON")
    assert len(json.loads(everything)) == count
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator(".entry.current .delete").click()
    expect(page.locator("#list .entry")).to_have_count(count - 1)
    page.locator("#export summary").click()
    with page.expect_file_chooser() as choosing:
        page.get_by_role("button", name="Import JSON").click()
    page.once("dialog", lambda dialog: (said.append(dialog.message), dialog.accept()))
    damaged = json.dumps([*json.loads(everything), {"id": "x", "messages": [None]}]).encode()
    choosing.value.set_files([{"name": "all.json", "mimeType": "application/json", "buffer": damaged}])
    expect(page.locator("#list .entry")).to_have_count(count)
    expect(page.locator("#said")).to_contain_text(f"Imported from all.json: {count}, 1 left out")
    assert len(said) == 1  # it is also shown
    page.fill("#search", "HELLO")
    expect(page.locator("#list .entry").first).to_contain_text("hello")
    page.fill("#search", "nowhere")
    expect(page.locator("#list .entry")).to_have_count(0)
    page.fill("#search", "")


def old(context: BrowserContext, url: str) -> None:
    """Conversations that an earlier version of the page has kept in localStorage."""
    page = context.new_page()
    page.goto(url)
    messages = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "as it was"}]
    one = {"id": "a", "title": "an old one", "system": "", "changed": 1, "revision": "x", "messages": messages}
    page.evaluate("one => localStorage.setItem('anyaccel.conversation.a', JSON.stringify(one))", one)
    for _ in range(2):
        page.reload()
        expect(page.locator("article .body").last).to_have_text("as it was")
        expect(page.locator("#list .entry")).to_have_count(1)
    assert page.evaluate("localStorage.getItem('anyaccel.conversation.a')") is None
    page.close()


def tabs(context: BrowserContext, url: str) -> None:
    """Two tabs lose nothing of each other's, and see what the other has kept."""
    one, two = context.new_page(), context.new_page()
    for page in (one, two):
        page.goto(url)
        expect(page.locator("#model")).to_have_value("fake")
        page.click("#new")
    say(one, "from one")
    answered(one, 2)
    say(two, "from two")
    answered(two, 2)
    for page in (one, two):
        expect(page.locator("#list .entry")).to_have_count(2)
    one.reload()
    expect(one.locator("#list")).to_contain_text("from one")
    expect(one.locator("#list")).to_contain_text("from two")

    # The same conversation in both: the other's messages appear, and an answer that comes there is no interrupted one.
    one.locator("#list >> text=from two").click()
    say(two, "more")
    answered(two, 4)
    expect(one.locator("article")).to_have_count(4)
    say(two, "forever")
    expect(one.locator("article")).to_have_count(6)
    expect(one.locator("article .speed").last).to_contain_text("in another tab")
    # What both say at the same place are two branches.
    one.locator("article.user").last.get_by_role("button", name="Edit").click()
    one.fill("article.edit textarea", "meanwhile")
    one.press("article.edit textarea", "Enter")
    expect(answered(one, 6)).to_have_text("You said: meanwhile")
    two.click("#stop")
    expect(two.locator("article .speed").last).to_contain_text("stopped")
    for page in (one, two):
        page.reload()
        expect(page.locator("article.user .versions")).to_contain_text("/2")
    one.get_by_role("button", name="Previous version").or_(one.get_by_role("button", name="Next version")).and_(
        one.locator(":enabled")
    ).click()
    expect(one.locator("article.user .versions")).to_contain_text("/2")

    # Deleted in one is deleted in both.
    one.on("dialog", lambda dialog: dialog.accept())
    one.locator(".entry.current .delete").click()
    expect(two.locator("#list .entry")).to_have_count(1)
    one.click("#open-settings")
    one.fill("#temperature", "0.5")
    one.press("#temperature", "Tab")
    expect(two.locator("#temperature")).to_have_value("0.5")
    one.close()
    two.close()


def interrupted(context: BrowserContext, url: str) -> None:
    """A reload, or the end of the browser, keeps what has come of an answer, and marks it."""
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#model")).to_have_value("fake")
    say(page, "forever")
    expect(page.locator("article .body").last).to_have_text("Y")
    page.click("#new")  # it goes on meanwhile
    expect(page.locator("#send")).to_be_visible()
    page.locator("#list >> text=forever").click()
    expect(page.locator("#stop")).to_be_visible()
    page.reload()
    expect(page.locator("article .body").last).to_have_text("Y")
    expect(page.locator("article .speed").last).to_contain_text("interrupted")
    page.click("text=Regenerate")
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator("article .body").last).to_have_text("Y")
    # The browser ends at once: the page keeps nothing at its end, but has kept it before.
    coming = """async () => {
      const { openDB } = await import("./page/vendor/idb.js");
      const found = await (await openDB("anyaccel", 1)).getAll("conversations");
      return found.some((each) => each.messages.some((message) => message.coming && message.content));
    }"""
    for _ in range(600):
        if page.evaluate(coming):
            break
        page.wait_for_timeout(100)
    with suppress(Error):
        page.goto("chrome://crash", timeout=10_000)
    other = context.new_page()
    other.goto(url)
    expect(other.locator("article .body").last).to_have_text("Y")
    expect(other.locator("article .speed").last).to_contain_text("interrupted")
    expect(other.locator("article.assistant .versions")).to_contain_text("2/2")
    other.close()


def full(context: BrowserContext, url: str) -> None:
    """A full browser is said, and loses nothing."""
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#model")).to_have_value("fake")
    say(page, "x" * 300)
    answered(page, 2)
    page.evaluate("""() => {
      const put = IDBObjectStore.prototype.put;
      IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
      globalThis.makeRoom = () => { IDBObjectStore.prototype.put = put; };
    }""")
    page.click("#new")
    say(page, "no room for this")
    expect(answered(page, 2)).to_have_text("You said: no room for this")
    expect(page.locator("#notice")).to_contain_text("no room left")
    expect(page.locator("#list .entry")).to_have_count(2)
    with page.expect_download() as loading:
        page.locator("#notice button").click()
    assert len(json.loads(Path(loading.value.path()).read_text())) == 2
    if FOLDER is not None:
        page.screenshot(path=FOLDER / "full.png")
    page.evaluate("makeRoom()")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#list .entry", has_text="xxx").hover()
    page.locator("#list .entry", has_text="xxx").locator(".delete").click()
    expect(page.locator("#notice")).to_be_hidden()
    page.reload()
    expect(page.locator("#list .entry")).to_have_count(1)
    expect(page.locator("#list")).to_contain_text("no room for this")
    page.close()


def no_quota(context: BrowserContext, url: str) -> None:
    """What the browser itself says once an origin has no room, which it remembers for a while."""
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Storage.overrideQuotaForOrigin", {"origin": url, "quotaSize": 1})
    page.goto(url)
    expect(page.locator("#model")).to_have_value("fake")
    say(page, "hello")
    answered(page, 2)
    expect(page.locator("#notice")).to_contain_text("no room left")
    page.close()


def stopping(context: BrowserContext, url: str) -> None:
    """Before the first word nothing is left of an answer; a selection stays while more of it comes."""
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#model")).to_have_value("fake")
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))  # it does not answer
    say(page, "anybody?")
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("article")).to_have_count(1)
    for route in held:
        route.abort()
    page.unroute("**/v1/chat/completions")
    page.click("text=Answer")
    expect(answered(page, 2)).to_have_text("You said: anybody?")

    say(page, "forever")
    body = page.locator("article .body").last
    expect(body).to_have_text("Y")
    body.evaluate("node => getSelection().selectAllChildren(node)")
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("getSelection().toString()").strip() == "Y"
    page.evaluate("getSelection().removeAllRanges()")
    expect(page.locator("article .speed").last).to_contain_text("stopped")

    error = {"error": {"message": "messages: 9 tokens", "code": "context_length_exceeded"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    say(page, "too much")
    expect(page.locator("article .wrong")).to_contain_text("longer than the model can read")

    half = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    for rest, said in (("", "ended before the answer was complete"), ("data: {x\n\n", "no part of an answer: {x")):
        sent = {"status": 200, "content_type": "text/event-stream", "body": half + rest}
        page.route("**/v1/chat/completions", lambda route, _, sent=sent: route.fulfill(**sent))
        say(page, "cut")
        last = page.locator("article").last
        expect(last.locator(".wrong")).to_contain_text(said)
        expect(last.locator(".text")).to_have_text("half")
    page.close()


def settings(page: Page) -> None:
    asked: list[dict[str, Any]] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#new")
    page.click("#open-settings")
    page.fill("#system", "Answer in French.")
    page.fill("#max_tokens", "9")
    page.fill("#temperature", "0")
    page.press("#temperature", "Tab")
    say(page, "prompt")
    expect(answered(page, 2)).to_have_text("<system>A")
    assert {"max_tokens": 9, "temperature": 0}.items() <= asked[-1].items(), asked
    page.fill("#max_tokens", "")
    page.fill("#temperature", "")
    page.press("#temperature", "Tab")
    page.click("text=Regenerate")
    expect(answered(page, 2)).to_contain_text("Answer in French.")
    assert set(asked[-1]) == {"messages", "model", "stream", "stream_options"}, asked  # the rest is the model's
    page.click("#open-settings")
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.click("#theme")
    page.once("dialog", lambda dialog: dialog.accept())
    page.locator(".entry.current .delete").click()
    expect(page.locator("#list .entry")).to_have_count(1)


def keyboard(page: Page) -> None:
    """All of a conversation without a mouse."""
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    answered(page, 2)
    expect(page.locator("#said")).to_have_text("The answer is complete")  # which a screen reader says
    edit = page.locator("article.user").get_by_role("button", name="Edit")
    edit.focus()
    page.keyboard.press("Enter")
    expect(page.locator("article.edit textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(edit).to_be_focused()
    page.keyboard.press("Shift+Escape")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#attach")).to_be_focused()


def accessible(page: Page) -> None:
    """No rule of axe-core is violated by what is shown."""
    found = Axe().run(page)
    assert not found.violations_count, found.generate_report()


def headings(page: Page) -> None:
    """Marks that close a heading are none of it; and long texts do not take seconds."""
    found = page.evaluate(
        """async () => {
          const { draw } = await import("./page/markdown.js");
          const shown = (text) => {
            const node = document.createElement("div");
            draw(node, text);
            return node.textContent;
          };
          const start = performance.now();
          const blanks = "# a" + " ".repeat(200000) + "x";
          const long = [blanks, "\\\\(".repeat(20000), "$$ a\\n".repeat(5000), "*a ".repeat(5000)];
          for (const each of long) shown(each);
          const seconds = (performance.now() - start) / 1000;
          const short = ["# C#", "## Two ##", "costs $3 and $4", "so \\\\*no\\\\*"];
          return [seconds, ...short.map((each) => shown(each).trim())];
        }"""
    )
    assert found[1:] == ["C#", "Two", "costs $3 and $4", "so *no*"], found
    assert found[0] < 20, f"{found[0]:.1f} s"


def tables(page: Page) -> None:
    """The words of a table that is wider than the page stay whole, and the table scrolls."""
    lines, scrolls = page.evaluate(
        """async () => {
          const { draw } = await import("./page/markdown.js");
          const node = document.querySelector("#messages").appendChild(document.createElement("div"));
          node.className = "body";
          const row = (cell) => `|${`${cell}|`.repeat(60)}\\n`;
          draw(node, row("word") + row("-") + row("word"));
          const cell = node.querySelector("td");
          const table = node.querySelector(".table");
          const lines = cell.offsetHeight / parseFloat(getComputedStyle(cell).lineHeight);
          const scrolls = table.scrollWidth > table.clientWidth;
          node.remove();
          return [lines, scrolls];
        }"""
    )
    assert lines < 2 and scrolls, (lines, scrolls)


def markdown(page: Page) -> None:
    """Answers are shown with their marks, and never run."""
    expect(page.locator("#model")).to_have_value("fake")
    before = page.locator("article").count()
    say(page, "markdown")
    body = answered(page, before + 2)
    for shown in (
        *("h2", "strong", "em", "del", "ol ul", "blockquote", "table", ".code pre", "details.reasoning", "a", "sub"),
        *(
            ".hljs-keyword",
            ".hljs-string",
            ".formula .katex",
            ".formula.display .katex-display",
            "input[type=checkbox]",
        ),
    ):
        expect(body.locator(shown).first).to_be_attached()
    expect(body.locator("input[type=checkbox]")).to_have_count(2)
    expect(body.locator("input[type=checkbox]").first).to_be_checked()
    expect(body).to_contain_text("a coffee costs $3 and a tea $2.")
    assert body.locator("script, img").count() == 0
    assert body.locator("a[href^='javascript']").count() == 0
    expect(body).to_contain_text('<script>alert("no")</script>')
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"the page is {wide} pixels wider than the window"


def key(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#settings")).to_be_visible()
    page.fill("#key", "sesame")
    page.press("#key", "Tab")
    expect(page.locator("#model")).to_have_value("fake")
    say(page, "opened")
    expect(answered(page, 2)).to_have_text("You said: opened")
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
    page.locator("#export summary").click()
    with page.expect_download() as loading:
        page.get_by_role("button", name="All as JSON").click()
    assert "sesame" not in Path(loading.value.path()).read_text()


def main() -> None:
    """All of it, at two widths, light and dark."""
    url, locked = sys.argv[1:3]
    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=options)
        for device, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                context.set_default_timeout(TIMEOUT)
                page = context.new_page()
                problems: list[str] = []
                page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
                page.on("request", lambda request, problems=problems: _note(request.url, problems, url, locked))
                if scheme == "light" and device == "desktop":
                    converse(page, url)
                    settings(page)
                    for check in (continuing, functions, attachments, exported, keyboard, headings, tables):
                        check(page)
                    key(page, locked)
                    for part in (tabs, interrupted, full, no_quota, stopping, old):
                        fresh = browser.new_context()
                        fresh.set_default_timeout(TIMEOUT)
                        part(fresh, url)
                        fresh.close()
                page.goto(url)
                expect(page.locator("#model")).to_have_value("fake")
                page.click("#open-side") if device == "phone" else None
                page.click("#new")
                accessible(page)
                markdown(page)
                page.locator("details.reasoning summary").click()
                accessible(page)
                if FOLDER is not None:
                    page.screenshot(path=FOLDER / f"{device}-{scheme}.png")
                page.locator("article.user").get_by_role("button", name="Edit").click()
                page.click("#open-settings")
                page.locator("#export summary").click()
                accessible(page)
                page.keyboard.press("Escape")
                if device == "phone":
                    page.click("#open-side")
                    expect(page.locator("#side")).to_be_in_viewport()
                    accessible(page)
                    page.keyboard.press("Escape")
                page.goto(f"{url}/docs")
                expect(page.locator("section").first).to_be_visible()
                accessible(page)
                assert not problems, problems
                context.close()
        browser.close()


def _note(asked: str, problems: list[str], *ours: str) -> None:
    if not asked.startswith((*ours, "data:")):
        problems.append(f"the page asks for {asked}")


if __name__ == "__main__":
    main()
