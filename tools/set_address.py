#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the public address of the repository wherever it belongs: docs/releasing.md says when.

python tools/set_address.py https://forge.example/owner/anyaccel
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")
_URLS = """[project.urls]
Homepage = "{0}"
Documentation = "{0}/tree/main/docs"
Changelog = "{0}/blob/main/CHANGELOG.md"
Issues = "{0}/issues"

[project.scripts]"""


def with_address(name: str, text: str, address: str) -> str:
    """A file's text with the address in it."""
    if name == "README.md":  # an index shows it away from the other files; pictures need the file itself

        def absolute(link: re.Match[str]) -> str:
            kind = "raw" if link[1] else "blob"
            return f"{link[1]}[{link[2]}]({address}/{kind}/main/{link[3]})"

        text = _LINK.sub(absolute, text)
        return text.replace("git clone …", f"git clone {address}")
    if name == "pyproject.toml":
        text = re.sub(r"\[project\.urls\]\n(?:.+\n)*\n", "", text)
        return text.replace("[project.scripts]", _URLS.format(address))
    if name == "CITATION.cff":
        return re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE) + f"repository-code: {address}\n"
    return re.sub(r"(- repo: )\S+", rf"\g<1>{address}", text)  # docs/porting.md


def main() -> int:
    if len(sys.argv) != 2 or not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", sys.argv[1]):
        print(__doc__, file=sys.stderr)
        return 2
    for name in ("README.md", "pyproject.toml", "CITATION.cff", "docs/porting.md"):
        file = ROOT / name
        file.write_text(with_address(name, file.read_text(), sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
