# SPDX-License-Identifier: Apache-2.0
"""Figures of several contenders as a table, as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anyaccel.bench.contenders import METRICS
from anyaccel.errors import AnyAccelError

Figures = Mapping[str, Mapping[str, Sequence[float]]]  # contender -> metric -> values of all rounds
_LESS_IS_BETTER = {"cold_start", "peak_memory_mb"}


def medians(figures: Figures) -> dict[str, dict[str, float]]:
    """The middle value of each figure."""
    return {
        name: {metric: statistics.median(values) for metric, values in metrics.items()}
        for name, metrics in figures.items()
    }


def ratios(figures: Figures, ours: str) -> dict[str, dict[str, float]]:
    """How many times better `ours` is than each contender, figure by figure."""
    middle = medians(figures)
    own = middle.get(ours, {})
    result: dict[str, dict[str, float]] = {}
    for name, metrics in middle.items():
        for metric, value in metrics.items():
            if metric in own and value and own[metric] and name != ours:
                better = value / own[metric] if metric in _LESS_IS_BETTER else own[metric] / value
                result.setdefault(name, {})[metric] = better
    return result


def table(figures: Figures, ours: str, width: int | None = None) -> str:
    """Markdown: the median of each figure, and behind it how many times better `ours` is.

    Args:
        width: columns of the terminal; a table that does not fit becomes one block of lines for each engine.
    """
    middle, better = medians(figures), ratios(figures, ours)
    used = [metric for metric in METRICS if any(metric in metrics for metrics in middle.values())]
    rows = [["engine", *used]]
    for name, metrics in middle.items():
        cells = [name]
        for metric in used:
            value = f"{metrics[metric]:.4g}" if metric in metrics else "-"
            ratio = better.get(name, {}).get(metric)
            cells.append(value + (f" ({ratio:.2f}x)" if ratio else ""))
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    if width is not None and len(lines[0]) > width:
        longest = max(map(len, used))
        blocks = (
            [row[0], *(f"  {name:{longest}}  {cell}" for name, cell in zip(used, row[1:], strict=True))]
            for row in rows[1:]
        )
        return "\n".join(line for block in blocks for line in block)
    lines.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(lines)


def check_plot(path: str) -> None:
    """Before anything is measured: whether `plot` will be able to write its picture.

    Raises:
        AnyAccelError: matplotlib is not installed, or the folder cannot be written to.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise AnyAccelError("--plot needs matplotlib: pip install matplotlib")
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise AnyAccelError(f"--plot {path}: {folder} is no folder that can be written to")
    if Path(path).exists() and not Path(path).is_file():
        raise AnyAccelError(f"--plot {path}: it is there, and is no file; give the name of a picture to write")


def plot(figures: Figures, ours: str, title: str, path: str) -> None:
    """Bars of the rates, one group a figure, one bar a contender.

    Raises:
        AnyAccelError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    middle = medians(figures)
    used = [m for m in ("decode", "prefill", "batch_decode") if any(m in metrics for metrics in middle.values())]
    picture, axes = pyplot.subplots(1, max(len(used), 1), figsize=(4 * max(len(used), 1), 0.5 * len(middle) + 1.6))
    for place, metric in zip(axes if len(used) > 1 else [axes], used, strict=True):
        names = [name for name in middle if metric in middle[name]]
        values = [middle[name][metric] for name in names]
        colours: list[Any] = ["#1f77b4" if name == ours else "#b0b0b0" for name in names]
        bars = place.barh(names, values, color=colours)
        place.bar_label(bars, [f" {value:.4g}" for value in values])
        place.invert_yaxis()
        place.margins(x=0.25)
        place.set_title(f"{metric.replace('_', ' ')}, tokens/s", fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
    picture.suptitle(title, fontsize=10)
    picture.tight_layout()
    try:
        picture.savefig(Path(path), dpi=150)
    except (OSError, ValueError) as error:
        raise AnyAccelError(f"--plot {path!r} cannot be written: {error}") from None
    finally:
        pyplot.close(picture)
