#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/pictures/performance.svg from the first table of docs/performance.md.

python tools/performance_chart.py           writes it
python tools/performance_chart.py --check   exit code 1 when it is out of date
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "pictures" / "performance.svg"
LEFT, UNIT, ROW = 330, 60, 24  # pixels: where bars begin, of one times as fast, of a row


def rows(page: str) -> list[tuple[str, float]]:
    """Each peer of the first table, with how many times as fast ours decodes."""
    table = page.split("| ours / peer |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [(row[0], float(re.findall(r"\(([\d.]+)\)", row[1])[0])) for row in cells]


def drawn(peers: list[tuple[str, float]]) -> str:
    """The chart: a bar a peer, and a line where ours would be no faster."""
    height = ROW * len(peers) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" font-family="sans-serif" '
        'font-size="13">',
        "<title>Decode of SmolLM2: how many times as fast as other engines</title>",
        f'<rect width="760" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" fill="#444">decode of SmolLM2: times as fast (line: 1)</text>',
    ]
    for number, (name, times) in enumerate(peers):
        y = 32 + ROW * number
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#222">{escape(name)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{times * UNIT:.0f}" height="{ROW - 7}" fill="#1f77b4"/>')
        parts.append(f'<text x="{LEFT + times * UNIT + 6:.0f}" y="{y + 14}" fill="#222">{times:g}</text>')
    parts.append(f'<path d="M{LEFT + UNIT} 28V{height - 6}" stroke="#d62728" stroke-dasharray="4 3"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    text = drawn(rows((DOCS / "performance.md").read_text(encoding="utf-8")))
    if "--check" not in sys.argv:
        PICTURE.write_text(text, encoding="utf-8")
    elif text != PICTURE.read_text(encoding="utf-8"):
        print(f"{PICTURE} is out of date: run python tools/performance_chart.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
