# SPDX-License-Identifier: Apache-2.0
"""Comments that silence findings: `# ignore-cuda`, `# noqa` and `# noqa: ACC101`."""

from __future__ import annotations

import re

_IGNORED = re.compile(r"#\s*ignore-cuda\b", re.IGNORECASE)
_NOQA = re.compile(r"#\s*noqa(?P<codes>:\s*[A-Z]+[0-9]*(?:[,\s]+[A-Z]+[0-9]+)*)?", re.IGNORECASE)


def is_silenced(line: str, code: str) -> bool:
    """Whether a comment in this line silences the rule of this code."""
    if "#" not in line:
        return False
    if _IGNORED.search(line):
        return True
    for match in _NOQA.finditer(line):
        codes = match["codes"]
        if codes is None or any(code.startswith(each.upper()) for each in re.findall(r"[A-Za-z]+\d*", codes)):
            return True
    return False
