# SPDX-License-Identifier: Apache-2.0
"""Processes by the files that they have open: of a process that has changed its title nothing else is sure."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def processes_with_files_below(folder: str) -> list[int]:
    """All others that have a file of the folder open."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # it ends just now
            for file in (entry / "fd").iterdir():
                with suppress(OSError):
                    if str(file.readlink()).startswith(f"{folder}/"):
                        found.add(int(entry.name))
    return sorted(found)
