#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands that a page of the documentation shows, and compares what they print with what the page says.

    python tools/doc_commands.py docs/cpu.md [--slow]

A ```console block has commands behind `$ ` (a backslash continues them) and what they print. Blocks run in the order of
the page, in one empty folder. A comment on the line above a block changes what is done with it:

    <!-- run: any output -->       the exit code counts, what is printed does not
    <!-- run: exit 2 -->           every command of the block ends with this code
    <!-- run: slow -->             only with --slow (a test marked slow)
    <!-- not run: WHY -->          WHY begins with hardware, network, hosts, root, minutes, or a test that runs it
    <!-- file: NAME -->            above a block of any other language: it is written to this file first

Each line that is shown must be printed, in this order; numbers may differ, `…` and `...` stand for anything.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE
)
_MARK = re.compile(r"<!-- (run|not run|file|include): (.*?) -->\s*\Z")
REASONS = ("hardware", "network", "hosts", "root", "minutes")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of the page.
        language: after the fence.
        body: the text.
        kind, mark: of the comment above it; empty without one.
    """

    line: int
    language: str
    body: str
    kind: str = ""
    mark: str = ""

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command of a console block, with the lines shown below it."""
        command, shown = "", list[str]()
        continued = False
        for line in self.body.splitlines():
            if continued:
                command += "\n" + line
            elif line.startswith("$ "):
                if command:
                    yield command, shown
                command, shown = line[2:], []
            else:
                shown.append(line)
                continue
            continued = line.endswith("\\")
        if command:
            yield command, shown


def blocks(text: str) -> Iterator[Block]:
    """All fenced blocks of a page."""
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text, 0, match.start()) if text[: match.start()].rstrip().endswith("-->") else None
        line = text.count("\n", 0, match.start()) + 1
        yield Block(line, match["language"], match["body"], *(mark.groups() if mark else ()))


def problem_of_mark(block: Block) -> str:
    """What is wrong with a console block's comment; empty when nothing is."""
    if block.kind == "not run":
        why = re.split(r"[,:; ]", block.mark)[0]
        if why not in REASONS and not (ROOT / why).exists():
            return f"<!-- not run: {block.mark} -->: {why} is neither of {', '.join(REASONS)} nor a path here"
    elif block.kind == "run":
        for each in block.mark.split(", "):
            if not re.fullmatch(r"any output|slow|exit \d+", each):
                return f"<!-- run: {block.mark} -->: {each!r} is not known"
    return ""


def run_page(page: Path, slow: bool = False) -> list[str]:
    """Run a page's commands; what was not as the page says."""
    wrong = []
    with tempfile.TemporaryDirectory(prefix="doc-") as folder:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.kind == "file":
                target = Path(folder) / block.mark
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.body, encoding="utf-8")
            if block.language != "console" or block.kind == "not run":
                continue
            options = block.mark.split(", ") if block.kind == "run" else []
            if ("slow" in options) != slow:
                continue
            code = next((int(each.split()[1]) for each in options if each.startswith("exit ")), 0)
            for command, shown in block.commands():
                failure = run(command, [] if "any output" in options else shown, code, Path(folder))
                if failure:
                    wrong.append(f"{page.name}:{block.line}: $ {command}\n{failure}")
    return wrong


def run(command: str, shown: list[str], code: int, folder: Path) -> str:
    """Run one command; how it differs from what is expected, or nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "ANYACCEL_", "OMP_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    # One thread: the work is tiny, and tests share the cores. A cache of its own, since some commands empty it.
    environment = kept | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PIP_NO_INDEX"] = "1"  # a page that is checked changes nothing here
    environment |= {"ANYACCEL_CACHE_DIR": str(folder / ".cache")}
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, text=True, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return f"  took longer than 300 s; printed so far:\n{(late.stdout or b'').decode(errors='replace')}"
    if done.returncode != code:
        return f"  exit code {done.returncode}, not {code}; it printed:\n{done.stdout}"
    missing = compare(shown, done.stdout)
    return f"  did not print {missing!r}, or not there; it printed:\n{done.stdout}" if missing else ""


def compare(shown: list[str], printed: str) -> str:
    """The first line shown that was not printed after the ones before it; empty when all were."""
    lines = iter([_plain(line) for line in printed.splitlines()])
    for line in shown:
        if not line.strip() or line.strip() in ("...", "…"):
            continue
        pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", _plain(line)))
        if not any(re.fullmatch(pattern, each) for each in lines):
            return line
    return ""


def _plain(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)*(\.dev\d+)?", "N", line)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--slow", action="store_true", help="the slow blocks instead of the others")
    options = parser.parse_args()
    wrong = [each for page in options.pages for each in run_page(page, options.slow)]
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
