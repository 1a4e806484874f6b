# SPDX-License-Identifier: Apache-2.0
"""Draws docs/map.svg: the parts of the package in layers; a part imports only what is in its own layer or below."""

from __future__ import annotations

from html import escape
from pathlib import Path

from generators import DOCS

# From the top. tests/unit/test_pages.py sees that each part is there.
LAYERS = [
    ("what a user calls", ["cli", "compat", "interop", "lightning", "cuda", "serve", "bench", "report"]),
    ("models", ["inference"]),
    ("between processes, and files", ["comm", "io"]),
    ("operations", ["ops"]),
    ("devices", ["accelerator"]),
    ("jobs and machines, without torch", ["launch", "topology", "port"]),
    ("ground floor", ["safetensors", "env", "errors", "vendors", "_registry"]),
    ("C++ (csrc)", ["llm", "comm ", "optim", "aio", "ccl", "simd", "common", "bindings"]),
]
WIDTH, ROW, LEFT = 860, 64, 250


def files() -> dict[Path, str]:
    rows = []
    for number, (title, parts) in enumerate(LAYERS):
        top = 10 + ROW * number
        rows.append(f'<rect x="5" y="{top}" width="{WIDTH - 10}" height="{ROW - 10}" rx="6" class="layer"/>')
        rows.append(f'<text x="20" y="{top + 32}" class="title">{escape(title)}</text>')
        room = (WIDTH - LEFT - 15) / len(parts)
        for place, part in enumerate(parts):
            x = LEFT + room * place
            rows.append(f'<rect x="{x:.0f}" y="{top + 10}" width="{room - 8:.0f}" height="34" rx="5" class="part"/>')
            rows.append(f'<text x="{x + (room - 8) / 2:.0f}" y="{top + 32}" class="name">{escape(part.strip())}</text>')
    height = 20 + ROW * len(LAYERS)
    style = (
        "text { font: 14px sans-serif; fill: #1b1f24 } .name { text-anchor: middle; font-size: 12px } "
        ".layer { fill: #eef2f7 } .part { fill: #ffffff; stroke: #8796a8 } .title { font-weight: bold }"
    )
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">\n'
        f"<style>{style}</style>\n" + "\n".join(rows) + "\n</svg>\n"
    )
    return {DOCS / "map.svg": picture}
