# SPDX-License-Identifier: Apache-2.0
"""What a quantisation tells of itself. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class QuantisedMatrix:
    """Attributes: relative_error: the norm of the error by the norm of the matrix; type: as the file calls it."""

    name: str
    rows: int
    cols: int
    group: int
    bytes: int
    relative_error: float
    type: str = ""


@dataclass
class Summary:
    """What was done; `bytes_before` and `bytes_after` are of all tensors."""

    model: str
    out: str
    dtype: str
    group: int
    asymmetric: bool
    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0.0
    relative_error: float = 0.0
    calibration: dict[str, Any] | None = None
    matrices: list[QuantisedMatrix] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
