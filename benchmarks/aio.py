# SPDX-License-Identifier: Apache-2.0
"""Reading and writing one file: ours against DeepSpeed's aio_handle, fio and readinto().

All take turns within each round, since the speed of a disk drifts; a figure is the median over the rounds. The file is
written once before, so nobody has to allocate it, and its pages are dropped from the page cache before every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import emit_json, machine, median, note, table

from anyaccel.ops.builders.aio import AsyncIOBuilder

BLOCK, DEPTH = 1 << 20, 32
BYTE = torch.empty(0, dtype=torch.uint8)
Run = Callable[[], float]  # seconds
_targets: dict[int, torch.Tensor] = {}


def drop_pages(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def timed(path: str, call: Callable[[], object]) -> Run:
    def run() -> float:
        drop_pages(path)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run


def readinto(path: str, tensor: torch.Tensor) -> None:
    with open(path, "rb", buffering=0) as file:
        rest = memoryview(tensor.numpy())
        while rest:
            rest = rest[file.readinto(rest) :]


def timed_readinto(path: str, size: int, cold: bool) -> float:
    """Seconds for the first `size` bytes of a file, into memory that is there."""
    target = _targets.setdefault(size, torch.ones(size, dtype=torch.uint8))
    if cold:
        drop_pages(path)
    else:
        readinto(path, target)
    start = time.perf_counter()
    readinto(path, target)
    return time.perf_counter() - start


def fio(path: str, size: int, write: bool, jobs: int, engine: str) -> Run:
    command = [
        "fio", "--name=t", f"--filename={path}", f"--rw={'write' if write else 'read'}", f"--bs={BLOCK}",
        f"--iodepth={DEPTH}", f"--ioengine={engine}", "--direct=1", f"--size={size // jobs}", f"--numjobs={jobs}",
        f"--offset_increment={size // jobs}", "--group_reporting", "--output-format=terse", "--terse-version=3",
        "--end_fsync=0",
    ]  # fmt: skip

    def run() -> float:
        drop_pages(path)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        line = next(line for line in done.stdout.splitlines() if line.count(";") > 50)
        return size / (float(line.split(";")[47 if write else 6]) * 1024)

    return run


def handles(rows: dict[str, Run], name: str, module: object, path: str, size: int, keep: list[object]) -> None:
    plain = torch.ones(size, dtype=torch.uint8)
    for threads in (1, 2):
        handle = module.aio_handle(BLOCK, DEPTH, False, True, threads)  # type: ignore[attr-defined]
        locked = handle.new_cpu_locked_tensor(size, BYTE)
        locked.fill_(1)
        keep += [handle, locked, plain]
        for what, tensor in (("locked", locked), ("unpinned", plain)):
            rows[f"{name}|write|{threads}|{what}"] = timed(path, lambda h=handle, t=tensor: h.sync_pwrite(t, path, 0))
            rows[f"{name}|read|{threads}|{what}"] = timed(path, lambda h=handle, t=tensor: h.sync_pread(t, path, 0))


def contenders(path: str, size: int, keep: list[object]) -> dict[str, Run]:
    """``name|read or write|threads|memory`` -> a run of it."""
    rows: dict[str, Run] = {}
    handles(rows, "anyaccel", AsyncIOBuilder().load(), path, size, keep)
    if importlib.util.find_spec("deepspeed") is None:
        note("DeepSpeed is not installed: left out (make bench-peers)")
    else:
        try:
            from deepspeed.ops.op_builder import AsyncIOBuilder as Theirs

            handles(rows, "DeepSpeed", Theirs().load(verbose=False), path, size, keep)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others can run
            note(f"DeepSpeed's async_io does not build (apt install libaio-dev?): left out: {error}")
    if shutil.which("fio") is None:
        note("fio is not installed: left out (apt install fio)")
    else:
        for engine in ("io_uring", "libaio"):
            for jobs in (1, 2):
                for write in (True, False):
                    rows[f"fio {engine}|{'write' if write else 'read'}|{jobs}|locked"] = fio(
                        path, size, write, jobs, engine
                    )
    target = torch.ones(size, dtype=torch.uint8)
    rows["readinto|read|1|unpinned"] = timed(path, lambda: readinto(path, target))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="of the file, in MiB")
    parser.add_argument("--dir", type=Path, help="folder for the file; default: the current one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="only contenders whose name|what|threads|memory has this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = options.size << 20
    folder = options.dir or Path.cwd()
    if shutil.disk_usage(folder).free < 2 * size:
        parser.error(f"{folder} has less than {2 * options.size} MiB free; use --dir or --size")
    times: dict[str, list[float]] = {}
    keep: list[object] = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix="aio-", suffix=".bin") as file:
        torch.ones(size, dtype=torch.uint8).numpy().tofile(file.name)
        runs = {name: run for name, run in contenders(file.name, size, keep).items() if options.only in name}
        names = list(runs)
        for round_number in range(-1, options.rounds):  # the first round only warms up
            shift = round_number % len(names)
            for name in names[shift:] + names[:shift]:
                seconds = runs[name]()
                if round_number >= 0:
                    times.setdefault(name, []).append(seconds)
    speed = {name: size / median(values) / 1e9 for name, values in times.items()}
    if options.json:
        emit_json({"machine": machine(), "bytes": size, "gb_per_second": speed, "seconds": times})
        return 0
    print(f"{options.size} MiB, blocks of 1 MiB, depth {DEPTH}, {options.rounds} rounds\n{machine()}\n")
    rows = []
    for name, value in speed.items():
        who, what, threads, memory = name.split("|")
        ours = speed.get(f"anyaccel|{what}|{threads}|{memory}", 0)
        ratio = f"{ours / value:.2f}" if who != "anyaccel" else ""
        slowest, fastest = size / max(times[name]) / 1e9, size / min(times[name]) / 1e9
        rows.append(
            [f"{what}, {threads} thread(s), {memory}", who, f"{value:.2f}", f"{slowest:.2f}", f"{fastest:.2f}", ratio]
        )
    print(table(["", "", "GB/s", "slowest", "fastest", "ours / it"], sorted(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
