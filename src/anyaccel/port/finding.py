# SPDX-License-Identifier: Apache-2.0
"""What is said of a place in a file."""

from __future__ import annotations

from dataclasses import dataclass

from anyaccel.port.rule import Tier


@dataclass(frozen=True)
class Finding:
    """One line of the report. Lines and columns count from 1; `cell` of a notebook too, 0 in a file.

    `end_line` is the last line of the code that it is about; `fixed`: its fix is made in the text that goes with it.
    """

    path: str
    line: int
    column: int
    code: str
    message: str
    tier: Tier
    fixed: bool = False
    cell: int = 0
    end_line: int = 0

    @property
    def place(self) -> str:
        cell = f":cell {self.cell}" if self.cell else ""
        return f"{self.path}{cell}:{self.line}:{self.column}"
