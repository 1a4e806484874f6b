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

from playwright.sync_api import BrowserContext, Error, Page, expect, sync_playwright

FOLDER = Path(sys.argv[3]) if len(sys.argv) > 3 else None
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

    page.locator("article.user >> text=Edit").click()
    page.fill("article.edit textarea", "edited")
    color = "e => getComputedStyle(e).color"
    assert page.locator("article.edit .primary").evaluate(color) == page.locator("#send").evaluate(color)
    page.locator("article.edit >> text=Send").click()
    expect(answered(page, 2)).to_have_text("You said: edited")
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

    page.reload()
    expect(page.locator("article")).to_have_count(6)  # kept by the browser
    expect(page.locator("#list .entry")).to_have_count(1)


def tabs(context: BrowserContext, url: str) -> None:
    """Two tabs lose nothing of each other's, and see what the other has kept."""
    one, two = context.new_page(), context.new_page()
    for page in (one, two):
        page.goto(url)
        expect(page.locator("#model")).to_have_value("fake")
        page.click("#new")
    before = one.locator("#list .entry").count()
    say(one, "from one")
    answered(one, 2)
    say(two, "from two")
    answered(two, 2)
    for page in (one, two):
        expect(page.locator("#list .entry")).to_have_count(before + 2)
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
    # What both go on with is kept twice.
    say(one, "meanwhile")
    expect(answered(one, 8)).to_have_text("You said: meanwhile")
    two.click("#stop")
    expect(two.locator("article")).to_have_count(6)
    for page in (one, two):
        page.reload()
        expect(page.locator("#list >> text=from two (2)")).to_have_count(1)
    one.locator("#list >> text=from two (2)").click()
    expect(one.locator("article")).to_have_count(6)
    expect(one.locator("article .speed").last).to_contain_text("stopped")

    # Deleted in one is deleted in both.
    one.on("dialog", lambda dialog: dialog.accept())
    two.locator("#list >> text=from two (2)").click()
    one.locator(".entry.current .delete").click()
    expect(two.locator("#list >> text=from two (2)")).to_have_count(0)
    one.fill("#temperature", "0.5") if one.locator("#settings").is_visible() else one.click("#open-settings")
    one.fill("#temperature", "0.5")
    one.press("#temperature", "Tab")
    expect(two.locator("#temperature")).to_have_value("0.5")
    one.evaluate("localStorage.clear()")
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
    expect(page.locator("article .body").last).to_have_text("Y")
    # The browser ends at once: the page keeps nothing at its end, but has kept it before.
    for _ in range(600):
        if page.evaluate("Object.values(localStorage).some((each) => each.includes('coming') && each.includes('Y'))"):
            break
        page.wait_for_timeout(100)
    with suppress(Error):
        page.goto("chrome://crash", timeout=10_000)
    other = context.new_page()
    other.goto(url)
    expect(other.locator("article .body").last).to_have_text("Y")
    expect(other.locator("article .speed").last).to_contain_text("interrupted")
    other.evaluate("localStorage.clear()")
    other.close()


def full(context: BrowserContext, url: str) -> None:
    """A full browser is said, and loses nothing."""
    page = context.new_page()
    page.goto(url)
    one = """(id, size) => ({ id, title: id, system: "", changed: 1,
      messages: [{ role: "user", content: "x".repeat(size) }] })"""
    page.evaluate(f"""() => {{
      const one = {one};
      for (const each of [1, 2, 3, 4]) {{
        const made = one(`old ${{each}}`, 1_200_000);
        localStorage.setItem(`anyaccel.conversation.${{made.id}}`, JSON.stringify(made));
      }}
    }}""")
    page.reload()
    expect(page.locator("#list .entry")).to_have_count(4)
    expect(page.locator("#notice")).to_be_hidden()
    page.evaluate("""() => {
      for (let size = 1 << 20; size; size >>= 1) {
        const name = `filler ${size}`;
        try { localStorage.setItem(name, "x".repeat(size)); } catch { }
      }
    }""")
    page.click("#new")
    say(page, "no room for this")
    expect(answered(page, 2)).to_have_text("You said: no room for this")
    expect(page.locator("#notice")).to_contain_text("no room left")
    expect(page.locator("#list .entry")).to_have_count(5)
    with page.expect_download() as loading:
        page.locator("#notice button").click()
    assert len(json.loads(Path(loading.value.path()).read_text())) == 5
    if FOLDER is not None:
        page.screenshot(path=FOLDER / "full.png")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#list .entry", has_text="old 4").hover()
    page.locator("#list .entry", has_text="old 4").locator(".delete").click()
    expect(page.locator("#notice")).to_be_hidden()
    page.reload()
    expect(page.locator("#list .entry")).to_have_count(4)
    expect(page.locator("#list")).to_contain_text("no room for this")
    page.evaluate("localStorage.clear()")
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
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".entry.current .delete").click()
    expect(page.locator("#list .entry")).to_have_count(1)


def headings(page: Page) -> None:
    """Marks that close a heading are none of it; and a line of blanks does not take seconds."""
    found = page.evaluate(
        """async () => {
          const { markdown } = await import("./page/markdown.js");
          const slow = "# a" + " ".repeat(200000) + "x";
          const formulas = "so \\\\(a_1*b*c_2\\\\) and \\\\[x\\\\] and $$y_1*z*$$ but \\\\*no\\\\*";
          const shown = markdown(formulas)[0].innerHTML;
          if (shown !== formulas.replaceAll("\\\\*", "*")) return [shown];
          return ["# C#", "## Two ##", "#", "# #", slow].map((each) => markdown(each)[0].textContent.slice(0, 5));
        }"""
    )
    assert found == ["C#", "Two", "#", "", "a    "], found


def markdown(page: Page) -> None:
    """Answers are shown with their marks, and never run."""
    expect(page.locator("#model")).to_have_value("fake")
    before = page.locator("article").count()
    say(page, "markdown")
    body = answered(page, before + 2)
    for shown in ("h2", "strong", "em", "del", "ol ul", "blockquote", "table", ".code pre", "details.reasoning", "a"):
        expect(body.locator(shown).first).to_be_attached()
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


def main() -> None:
    """All of it, at two widths, light and dark."""
    url, locked = sys.argv[1:3]
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=options)
        for device, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                context.set_default_timeout(60_000)
                page = context.new_page()
                problems: list[str] = []
                page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
                page.on("request", lambda request, problems=problems: _note(request.url, problems, url, locked))
                if scheme == "light" and device == "desktop":
                    converse(page, url)
                    settings(page)
                    headings(page)
                    key(page, locked)
                    for part in (tabs, interrupted, full, stopping):
                        fresh = browser.new_context()
                        fresh.set_default_timeout(60_000)
                        part(fresh, url)
                        fresh.close()
                page.goto(url)
                markdown(page)
                if FOLDER is not None:
                    page.screenshot(path=FOLDER / f"{device}-{scheme}.png")
                if device == "phone":
                    page.click("#open-side")
                    expect(page.locator("#side")).to_be_in_viewport()
                    page.keyboard.press("Escape")
                assert not problems, problems
                context.close()
        browser.close()


def _note(asked: str, problems: list[str], *ours: str) -> None:
    if not asked.startswith((*ours, "data:")):
        problems.append(f"the page asks for {asked}")


if __name__ == "__main__":
    main()
