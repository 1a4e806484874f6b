# SPDX-License-Identifier: Apache-2.0
"""All-reduces between ranks whose cores have other work: backend shm beside gloo, with N busy loops and without.

Each step of a rank computes for a while and then all-reduces, as a token of a tensor-parallel model (20 KB, 0.2 ms)
or a bucket of DistributedDataParallel (1 MB, 2 ms) does. Each rank is bound to a core, the busy loops to nothing. The
backends take turns, round by round, in the same processes; the median of a round's time a step counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import emit_json, machine, median, note, table

# Bytes, seconds of computing, steps, and whether the call is asynchronous, as those of DistributedDataParallel are.
SHAPES = {
    "token": (20 << 10, 0.2e-3, 150, False),
    "bucket": (1 << 20, 2e-3, 40, True),
    "bucket, waiting": (1 << 20, 2e-3, 40, False),
}
BACKENDS = ("shm", "gloo")


def compute(seconds: float) -> None:
    """As much work as takes so long on a core of one's own: time that the core is taken away does not count."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def worker(rank: int, size: int, folder: str, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    import anyaccel.comm  # noqa: F401

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    times: dict[str, dict[str, list[float]]] = {shape: {name: [] for name in BACKENDS} for shape in SHAPES}
    for shape, (size_b, seconds, steps, is_async) in SHAPES.items():
        tensor = torch.zeros(size_b // 4)
        for round_number in range(rounds + 1):
            for name, group in groups.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    compute(seconds)
                    work = dist.all_reduce(tensor, group=group, async_op=is_async)
                    if work is not None:
                        work.wait()
                if round_number:
                    times[shape][name].append((time.perf_counter() - start) / steps * 1e3)
    if rank == 0:
        Path(folder, "times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, loops: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The times of a step in ms, by shape and backend, with so many busy loops beside."""
    busy = [
        # In a session of its own, as other people's work is, which the kernel weighs as one group of processes.
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(loops)
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--worker", folder, "--ranks", str(size), "--rounds", str(rounds)]
            ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
            codes = [rank.wait(600) for rank in ranks]
            if any(codes):
                raise SystemExit(f"the ranks ended with {codes}")
            found: dict[str, dict[str, list[float]]] = json.loads(Path(folder, "times").read_text())
            return found
    finally:
        for loop in busy:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loops", type=int, nargs="+", default=[0, len(os.sched_getaffinity(0))])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.rank, options.ranks, options.worker, options.rounds)
        return
    rows, results = [], {}
    for loops in options.loops:
        note(f"{loops} busy loops …")
        results[loops] = measure(options.ranks, loops, options.rounds)
        for shape, times in results[loops].items():
            ours, theirs = (median(times[name]) for name in BACKENDS)
            rows.append([f"{shape}, {loops} busy loops", f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}"])
    print(machine())
    print(table(["ms a step", *BACKENDS, "ratio"], rows))
    emit_json(results)


if __name__ == "__main__":
    main()
