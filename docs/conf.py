# SPDX-License-Identifier: Apache-2.0
"""How Sphinx makes the site from these pages: `make docs`. The pages are plain Markdown and read as well without it.

The order of the pages and the headings above them are those of index.md; what is not listed there comes last.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from anyaccel import __version__  # noqa: E402

project = "anyaccel"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"anyaccel {release}"
html_show_copyright = False
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "literal"  # docstrings are written with Markdown's backticks

_ABOVE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]*)(#[^)]*)?\)")
_MARKS = re.compile(r"(?<![\\:])([*|])|(\w)_(?=\W|$)")
_ENTRY = re.compile(r"^- \[[^\]]*\]\(([\w/-]+)\.(?:md|rst)\)", re.MULTILINE)


def _read_source(app: Any, name: str, source: list[str]) -> None:
    # What is not part of the site (sources, examples) is named by its path in the repository.
    source[0] = _ABOVE.sub(lambda match: f"{match[1]} (`{match[2]}`)", source[0])
    if name == "index":
        for section in reversed(list(re.finditer(r"^## (.*)\n((?:(?!^## ).*\n)*)", source[0], re.MULTILINE))):
            pages = _ENTRY.findall(section[2])
            tree = f"```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n" + "\n".join(pages) + "\n```\n\n"
            source[0] = source[0][: section.start()] + tree + source[0][section.start() :] if pages else source[0]
        rest = sorted(app.env.found_docs - set(_ENTRY.findall(source[0])) - {"index"})
        if rest:
            source[0] += "\n```{toctree}\n:hidden:\n:caption: More\n\n" + "\n".join(rest) + "\n```\n"


def _read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are prose with Markdown's backticks; what reStructuredText would take for its own marks is escaped."""
    for number, line in enumerate(lines):
        parts = re.split(r"(``.*?``|`[^`]*`)", line)
        lines[number] = "".join(part if part.startswith("`") else _MARKS.sub(_escape, part) for part in parts)


def _escape(match: re.Match[str]) -> str:
    return f"\\{match[1]}" if match[1] else f"{match[2]}\\_"


def setup(app: Any) -> None:
    app.connect("source-read", _read_source)
    app.connect("autodoc-process-docstring", _read_docstring, priority=100)
