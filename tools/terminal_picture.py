#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a terminal with commands and what they have printed, as an SVG file for the README and the site.

    python tools/terminal_picture.py docs/pictures/topo.svg 'anyaccel topo' ...

The commands run here and now, with the programs beside this Python, so that a picture shows real output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

WIDTH, SIZE, LINE = 100, 14, 19
STYLE = """text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
fill: #e6e6e6; white-space: pre; } .command { fill: #8be08b; font-weight: bold; }"""


def drawing(lines: list[tuple[str, str]]) -> str:
    """The SVG of lines, each with its class ("" or "command")."""
    advance = SIZE * 0.602  # of one character of those fonts
    width = round(advance * max(len(text) for _, text in lines)) + 40
    height = LINE * len(lines) + 30
    rows = "\n".join(
        f'<text x="20" y="{30 + LINE * number}" class="{kind}" xml:space="preserve">{escape(text)}</text>'
        for number, (kind, text) in enumerate(lines)
        if text
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<style>{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#1b1f24"/>\n{rows}\n</svg>\n'
    )


def main(arguments: list[str]) -> int:
    lines = []
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in arguments[1:]:
        environment = os.environ | {"PATH": path, "COLUMNS": str(WIDTH)}
        done = subprocess.run(
            ["bash", "-c", f"{command} 2>&1"], env=environment, capture_output=True, text=True, check=True
        )
        lines += [("", "")] * bool(lines) + [("command", f"$ {command}")]
        for line in done.stdout.rstrip().splitlines():
            lines += [("", part) for part in textwrap.wrap(line, WIDTH, replace_whitespace=False) or [""]]
    target = Path(arguments[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(drawing(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
