# SPDX-License-Identifier: Apache-2.0
"""The comms log: how often each collective ran, with how many bytes, how long it took, and who was late.

Off by default: an operation then asks one flag. On, it costs each operation two readings of the clock and an entry in a
table of this process; ranks talk to each other about it in `log_summary()` only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch.distributed as dist

from anyaccel import _native, env

_SAMPLES = 1000  # the most latencies of an entry; when it is full, every second one is dropped from then on


@dataclass
class LogEntry:
    """The record of one operation at one size on one rank.

    Attributes:
        op: name of the operation.
        size: bytes of this rank's input.
        ranks: the size of the group.
        group: the group's name.
        count: the number of calls.
        seconds: the duration of all calls together.
        longest: the duration of the longest call.
        samples: the durations of some calls, evenly spread over all of them.
    """

    op: str
    size: int
    ranks: int
    group: str
    count: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    samples: list[float] = field(default_factory=list)
    _every: int = 1

    def add(self, seconds: float) -> None:
        """Count one call."""
        if self.count % self._every == 0:
            if len(self.samples) >= _SAMPLES:
                self.samples = self.samples[::2]
                self._every *= 2
            if self.count % self._every == 0:
                self.samples.append(seconds)
        self.count += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


_entries: dict[tuple[str, int, str], LogEntry] = {}
_lock = threading.Lock()
_on: bool | None = None  # None: as the environment says


def active() -> bool:
    """Whether operations are recorded."""
    if _on is None:
        configure(env.ANYACCEL_COMMS_LOG.get())
    return bool(_on)


def configure(enabled: bool = True) -> None:
    """Record operations from now on, or no longer. The variable ANYACCEL_COMMS_LOG=1 does it from the start.

    Recorded is what groups of the backends shm and ccl do, whoever calls them (DDP and FSDP too), and the inference
    collectives on them. Groups of torch's own backends are not: torch's profiler shows those.
    """
    global _on
    _on = enabled
    _native.enable_fast(not enabled)  # the native fast path bypasses Python, and so the log


def reset() -> None:
    """Forget what was recorded."""
    with _lock:
        _entries.clear()


def record(op: str, size: int, seconds: float, group: Any) -> None:
    """Record one operation of this rank.

    Args:
        op: its name.
        size: bytes that this rank gives.
        seconds: how long it took.
        group: the process group.
    """
    key = (op, size, _name(group))
    with _lock:
        entry = _entries.get(key)
        if entry is None:
            entry = _entries[key] = LogEntry(op, size, group.size(), key[2])
        entry.add(seconds)


def entries() -> list[LogEntry]:
    """The records of this rank, by operation and size."""
    with _lock:
        return sorted(_entries.values(), key=lambda entry: (entry.op, entry.size, entry.group))


def _name(group: Any) -> str:
    return str(getattr(group, "group_name", "") or "")


# Bandwidth -----------------------------------------------------------------------------------------------------

# Bus bandwidth / bytes per second of a rank's input, for n ranks, as in NCCL's tests and DeepSpeed's log.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def bandwidths(op: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in Gbit/s: what the caller gets, and what a link carries.

    The size of an all_gather is that of all ranks together, as in NCCL's tests.
    """
    if seconds <= 0:
        return 0.0, 0.0
    whole = size * ranks if op == "all_gather" else size
    algorithm = whole / seconds * 8e-9
    factor = _BUS[op](ranks) if op in _BUS else 1.0
    return algorithm, size / seconds * 8e-9 * factor


# The summary ----------------------------------------------------------------------------------------------------


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 what was recorded, and return it. Collective: every rank of the job calls it.

    DeepSpeed's name, arguments, table and dictionary, and one column more: the straggler. Latencies are rank 0's, of an
    operation with those of the same name and size in other groups; the average leaves a tenth at either end out.
    An operation ends on all ranks at once, so the rank that spends least time in it is the one that came last.

    Args:
        show_straggler: also print how long the ranks waited for the last one.
        return_dict: return the figures, on every rank; otherwise None.

    Returns:
        "summary" and "straggler_analysis" (None without `show_straggler`), each by operation and size in bytes, and
        "metadata".
    """
    mine = [(entry.op, entry.size, entry.ranks, entry.count, entry.seconds, entry.samples) for entry in entries()]
    everyones: list[Any] = [mine]
    rank, world = 0, 1
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        was, everyones = active(), [None] * world
        configure(enabled=False)  # the collectives that the summary itself makes are not part of it
        try:
            dist.all_gather_object(everyones, mine)
        finally:
            configure(enabled=was)
    tables = [_by_operation(rows) for rows in everyones]
    summary: dict[str, dict[int, dict[str, Any]]] = {}
    waits: dict[str, dict[int, dict[str, Any]]] = {}
    for (op, size), row in sorted(tables[0].items()):
        average = _trimmed_mean(row.samples)
        algorithm, bus = bandwidths(op, size, average, row.ranks)
        late = _find_straggler([table.get((op, size)) for table in tables])
        common = {"msg_size_bytes": size, "msg_size_str": _size_text(size)}
        summary.setdefault(op, {})[size] = {
            "count": row.count,
            "total_latency_ms": 1e3 * row.seconds,
            "avg_latency_ms": 1e3 * average,
            "tput_avg_gbps": algorithm,
            "busbw_avg_gbps": bus,
            "straggler_rank": late.rank,
            **common,
        }
        waits.setdefault(op, {})[size] = {
            "count": row.count,
            "total_comm_lat_ms": 1e3 * late.least,
            "total_straggler_ms": 1e3 * (row.seconds - late.least),
            "avg_comm_lat_ms": 1e3 * late.least / row.count,
            "avg_straggler_ms": 1e3 * (row.seconds - late.least) / row.count,
            "straggler_rank": late.rank,
            **common,
        }
    if rank == 0:
        print(_table(summary, _SUMMARY))  # noqa: T201 (what it is for)
        if show_straggler:
            print("\nBreakdown with straggler effect\n" + _table(waits, _WAITS))  # noqa: T201
    if not return_dict:
        return None
    now = datetime.now(UTC).isoformat()
    return {
        "summary": summary,
        "straggler_analysis": waits if show_straggler else None,
        "metadata": {"world_size": world, "rank": rank, "timestamp": now},
    }


class _Straggler(NamedTuple):
    rank: int | None  # None: there is one rank only, or the ranks' numbers of calls differ
    least: float  # the seconds that this rank, which waits least, has spent in the operation


@dataclass
class _Row:
    ranks: int
    count: int
    seconds: float
    samples: list[float]


def _by_operation(rows: list[tuple[str, int, int, int, float, list[float]]]) -> dict[tuple[str, int], _Row]:
    """The entries by operation and size, with those of all groups added up."""
    found: dict[tuple[str, int], _Row] = {}
    for op, size, ranks, count, seconds, samples in rows:
        row = found.setdefault((op, size), _Row(ranks, 0, 0.0, []))
        row.ranks = max(row.ranks, ranks)
        row.count += count
        row.seconds += seconds
        row.samples = row.samples + samples
    return found


def _find_straggler(rows: list[_Row | None]) -> _Straggler:
    there = [(row.seconds, rank) for rank, row in enumerate(rows) if row is not None]
    least, rank = min(there)
    alike = len(there) > 1 and len({row.count for row in rows if row is not None}) == 1
    return _Straggler(rank if alike else None, least)


def _trimmed_mean(values: list[float]) -> float:
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def _size_text(size: int) -> str:
    """ "64.0 KB"."""
    value, units = float(size), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


_SUMMARY = {
    "count": "Count",
    "total_latency_ms": "Total Latency(ms)",
    "avg_latency_ms": "Avg Latency(ms)",
    "tput_avg_gbps": "tput_avg (Gbps)",
    "busbw_avg_gbps": "busbw_avg (Gbps)",
    "straggler_rank": "Straggler (rank)",
}
_WAITS = {
    "count": "Count",
    "total_comm_lat_ms": "Total comm lat(ms)",
    "total_straggler_ms": "Total straggler(ms)",
    "avg_comm_lat_ms": "Avg comm lat(ms)",
    "avg_straggler_ms": "Avg straggler(ms)",
    "straggler_rank": "Straggler (rank)",
}


def _table(figures: dict[str, dict[int, dict[str, Any]]], columns: dict[str, str]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "".join(f"{cell: <20}" for cell in cells).rstrip()

    lines = [line(["Comm. Op", "Message Size", *columns.values()])]
    for op, sizes in figures.items():
        lines.append(op)
        for figure in sizes.values():
            lines.append(line(["", figure["msg_size_str"], *(_cell(figure[name]) for name in columns)]))
    return "\n".join(lines)


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 100 else f"{value:.0f}"
