# SPDX-License-Identifier: Apache-2.0
"""Draws docs/pictures/performance.svg from the first table of docs/performance.md."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from generators import DOCS

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


def files() -> dict[Path, str]:
    return {PICTURE: drawn(rows((DOCS / "performance.md").read_text(encoding="utf-8")))}
