# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine's name, medians, tables."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path


def machine() -> str:
    """One line: processor, instruction set that our kernels use, cores, versions."""
    import torch

    from anyaccel import __version__, _native
    from anyaccel.topology import read_machine

    told = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    model = told.get("model name", platform.machine())
    if "cpu family" in told:  # virtual machines often give processors of different kinds one name
        model += f", family {told['cpu family']}"
    features = [name for name, there in _native.cpu_features().items() if there and name.startswith(("amx", "avx512_"))]
    extra = ", ".join(features) or "no AMX, no AVX-512 BF16"
    return (
        f"{model} ({_native.isa()}; {extra}), {read_machine().summary()}; "
        f"anyaccel {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first one to the left."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            + " |"
        )

    rule = (
        "| "
        + " | ".join("-" * width if column == 0 else "-" * (width - 1) + ":" for column, width in enumerate(widths))
        + " |"
    )
    return "\n".join([line(header), rule, *map(line, rows)])


def note(text: str) -> None:
    """Progress and remarks, apart from the table."""
    print(text, file=sys.stderr, flush=True)


def emit_json(value: object) -> None:
    print(json.dumps(value, indent=1))
