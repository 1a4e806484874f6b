# SPDX-License-Identifier: Apache-2.0
"""Turns a collected report into text for people."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from anyaccel.terminal import fitted


def render(report: dict[str, Any], width: int | None = None) -> str:
    """The report as aligned text, one block a subject, without a trailing newline.

    Args:
        width: columns that a line may take; None breaks none.
    """
    blocks = (
        ("versions", _versions(report["versions"])),
        ("accelerator", _accelerator(report["accelerator"])),
        ("cpu", _cpu(report["cpu"])),
        ("topology", _topology(report["topology"])),
    )
    text = "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in blocks)
    return fitted(text, width)


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _versions(versions: dict[str, str | None]) -> list[str]:
    return _columns((name, version or "not installed") for name, version in versions.items())


def _accelerator(accelerator: dict[str, Any] | None) -> list[str]:
    if accelerator is None:
        return ["not looked at (--no-torch)"]
    if accelerator["name"] is None:
        head = [("chosen", "none"), ("error", accelerator["error"])]
    else:
        show = functools.partial(_known, accelerator)
        head = [
            ("chosen", f"{accelerator['name']}: {accelerator['why']}"),
            ("devices", f"{show('device_count')}, current {show('device')}"),
            ("memory", f"{show('total_memory_bytes', _gib)}, {show('available_memory_bytes', _gib)} free"),
            ("dtypes", show("dtypes", " ".join)),
            ("collectives", show("communication_backend")),
        ]
        if accelerator["runtime_versions"] != {}:
            head.append(("runtime", show("runtime_versions", _pairs)))
    candidates = _columns(
        (
            f"{'*' if row['chosen'] else ' '} {row['name']}",
            "available" if row["available"] else "unavailable",
            f"{row['probe_s'] * 1e3:.0f} ms",
            row["reason"] or row["why"],
        )
        for row in accelerator["candidates"]
    )
    if not candidates:
        return _columns(head)
    return [*_columns(head), "candidates in detection order, with the time that probing took:", *candidates]


def _cpu(cpu: dict[str, Any]) -> list[str]:
    if "error" in cpu:
        return [f"error  the native part of anyaccel cannot be loaded: {cpu['error']}"]
    present = [name for name, there in cpu["features"].items() if there]
    return _columns([("kernels", cpu["isa"]), ("features", " ".join(present) or "none")])


def _topology(topology: dict[str, Any]) -> list[str]:
    if "error" in topology:
        return [f"error  {topology['error']}"]
    rows = [
        (
            f"node {node['id']}",
            f"cpus {node['cpus'] or 'none'}",
            f"usable cores {node['allowed_cores'] or 'none'}",
            _gib(node["memory_bytes"]),
        )
        for node in topology["nodes"]
    ]
    return [topology["summary"], *_columns(rows)]


def _known(accelerator: dict[str, Any], name: str, text: Callable[[Any], str] = str) -> str:
    """An answer as text, or why there is none."""
    reason = accelerator["unknown"].get(name)
    return text(accelerator[name]) if reason is None else f"unknown ({reason})"


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
