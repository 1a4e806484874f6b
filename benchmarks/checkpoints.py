# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch.distributed.checkpoint: our FileSystemWriter and FileSystemReader beside torch's and the disk.

One process saves a state of many tensors with `async_save`, each time into a new folder. Two times count: that for
which training waits (the copy of the state), and that until the checkpoint is on the disk. The disk's own rate is that
of `aio_handle` for one tensor of the same size, synced. All take turns in each round; a figure is the median over the
rounds. What is read has left the page cache before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _common import emit_json, machine, median, note, table
from torch.distributed.checkpoint.filesystem import FileSystemReader as TorchReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter

from anyaccel.io import FileSystemReader, FileSystemWriter
from anyaccel.io.reading import new_handle

Times = dict[str, float]  # what -> seconds


def drop_pages(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def through_torch(state: Any, writer: Any, reader: type[TorchReader], folder: Path) -> Times:
    writer.reset(folder)
    begin = time.perf_counter()
    saved: Any = dcp.async_save(state, storage_writer=writer)
    copied = time.perf_counter()
    saved.result()
    done = time.perf_counter()
    drop_pages(folder)
    read = timed(lambda: dcp.load(state, storage_reader=reader(folder)))
    shutil.rmtree(folder)
    return {"waits": copied - begin, "write": done - copied, "read": read}


def plain(data: torch.Tensor, folder: Path) -> Times:
    file = folder / "plain"

    def write() -> None:
        with file.open("wb", buffering=0) as opened:
            handle = new_handle()
            handle.async_pwrite(data, opened.fileno())
            handle.wait()
            os.fsync(opened.fileno())

    write_seconds = timed(write)
    drop_pages(folder)
    times = {"write": write_seconds, "read": timed(lambda: new_handle().sync_pread(data, file))}
    file.unlink()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="of the state, in MiB")
    parser.add_argument("--tensor", type=int, default=16, help="of one tensor, in MiB")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="folder for the files; default: the current one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = options.size << 20
    if shutil.disk_usage(options.dir).free < 4 * size:
        parser.error(f"{options.dir} has less than {4 * options.size} MiB free; use --dir or --size")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled|Detected an existing checkpoint")
    state = {str(number): torch.randn(options.tensor << 18) for number in range(options.size // options.tensor)}
    data = torch.randn(size // 4)
    found: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="checkpoints-") as name:
        folders = {side: Path(name) / side for side in ("disk", "anyaccel", "torch")}
        folders["disk"].mkdir()
        ours = FileSystemWriter(folders["anyaccel"], cache_staged_state_dict=True)
        runs: dict[str, Callable[[], Times]] = {
            "disk": lambda: plain(data, folders["disk"]),
            "anyaccel": lambda: through_torch(state, ours, FileSystemReader, folders["anyaccel"]),
            "torch": lambda: through_torch(state, TorchWriter(folders["torch"]), TorchReader, folders["torch"]),
        }
        names = list(runs)
        for round_number in range(-1, options.rounds):  # the first round only warms up
            shift = round_number % len(names)
            for side in names[shift:] + names[:shift]:
                times = runs[side]()
                if round_number >= 0:
                    found.setdefault(side, []).append(times)
    rows = [
        {
            "name": side,
            "waits": median([each["waits"] for each in found[side]]) if side != "disk" else None,
            **{what: median([size / each[what] for each in found[side]]) / 1e9 for what in ("write", "read")},
            **{
                f"{what} / disk": median(
                    [disk[what] / each[what] for disk, each in zip(found["disk"], found[side], strict=True)]
                )
                for what in ("write", "read")
            },
        }
        for side in names
    ]
    if options.json:
        emit_json({"machine": machine(), "rows": rows})
    else:
        note(machine())
        shown = [
            [f"{value:.2f}" if isinstance(value, float) else value or "" for value in row.values()] for row in rows
        ]
        print(table(("", "training waits, s", "write, GB/s", "read, GB/s", "write / disk", "read / disk"), shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
