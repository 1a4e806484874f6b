# SPDX-License-Identifier: Apache-2.0
"""Put code from source files into the Markdown pages that show it.

A page says `<!-- include: path/in/the/repository.py#name -->` before a fenced block; the source has the block between
the comments `# [name]` and `# [/name]` (or `// [name]`). Without `#name` the whole file is shown. With --check nothing
is written and the exit code is 1 when a page is not up to date.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from generators import DOCS, ROOT

_BLOCK = re.compile(
    r"(<!-- include: (?P<target>\S+) -->\n```\w*\n)(?P<code>.*?)(?P<end>^```$)", re.DOTALL | re.MULTILINE
)
_MARKER = re.compile(r"\s*(#|//) \[(?P<name>/?[\w-]+)\]\s*")


def snippet(target: str) -> str:
    """The text that `path` or `path#name` stands for, without indentation and markers.

    Raises:
        ValueError: there is no such file or snippet.
    """
    path, _, name = target.partition("#")
    try:
        lines = (ROOT / path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{target}: {error}") from None
    found = {match["name"]: at for at, line in enumerate(lines) if (match := _MARKER.fullmatch(line))}
    if name and not (name in found and f"/{name}" in found):
        raise ValueError(f"{target}: {path} has no lines '[{name}]' and '[/{name}]'")
    if name:
        lines = lines[found[name] + 1 : found[f"/{name}"]]
    text = "\n".join(line for line in lines if not _MARKER.fullmatch(line))
    return textwrap.dedent(text).strip("\n") + "\n"


def expand(page: str) -> str:
    """The text of a page with each included block as it is in its source.

    Raises:
        ValueError: an include has no block behind it, or no source.
    """
    wanted = page.count("<!-- include:")
    expanded, count = _BLOCK.subn(lambda match: match[1] + snippet(match["target"]) + match["end"], page)
    if count != wanted:
        raise ValueError(f"{wanted} includes, but {count} of them are followed by a fenced block")
    return expanded


def files() -> dict[Path, str]:
    pages = {path: path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]}
    return {path: expand(text) for path, text in pages.items() if "<!-- include: " in text}
