# SPDX-License-Identifier: Apache-2.0
"""In-place all-reduce among ranks of one host, from Python: ours against gloo and DeepSpeed's shared-memory op.

Each rank is bound to its own core. For each size the contenders take turns, round by round, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import emit_json, machine, median, note, table

SIZES = (1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS = 5


def contenders() -> tuple[dict[str, Callable[..., object]], dict[str, str]]:
    """Name -> in-place all-reduce, ours first; name -> why a peer is left out."""
    import torch.distributed as dist

    from anyaccel import comm

    comm.init_distributed("gloo")
    found: dict[str, Callable[..., object]] = {"anyaccel": comm.inference_all_reduce, "gloo": dist.all_reduce}
    missing = {}
    try:
        import deepspeed.comm as deepspeed_comm

        deepspeed_comm.init_distributed(dist_backend="gloo", verbose=False)
        found["deepspeed"] = deepspeed_comm.inference_all_reduce
    except ImportError as error:
        missing["deepspeed"] = f"{error}; make bench-peers"
    return found, missing


def worker(result_file: str, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    found, missing = contenders()
    clock = time.perf_counter_ns
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in sizes:
            tensor = torch.ones(size // dtype.itemsize, dtype=dtype)
            calls = max(5, min(2000, (256 << 20) // size // 8))
            times: dict[str, list[float]] = {name: [] for name in found}
            for name, reduce in found.items():
                tensor.fill_(1)
                reduce(tensor)
                if not bool((tensor == dist.get_world_size()).all()):
                    missing[name] = f"WRONG SUM for {size} bytes of {dtype}"
            tensor.zero_()
            for _ in range(ROUNDS):
                for name, reduce in found.items():
                    dist.barrier()
                    for call in range(-calls // 10, calls):
                        start = clock()
                        reduce(tensor)
                        if call >= 0:
                            times[name].append((clock() - start) / 1e3)
            p99 = {name: sorted(values)[int(len(values) * 0.99)] for name, values in times.items()}
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "bytes": size,
                    "median_us": {name: median(values) for name, values in times.items()},
                    "p99_us": p99,
                }
            )
            if dist.get_rank() == 0:
                note(f"{rows[-1]['dtype']} {size >> 10} KB done")
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps({"rows": rows, "left_out": missing}))
    dist.barrier()
    os._exit(0)  # DeepSpeed leaves threads that abort a normal exit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.max_bytes]
    if options.worker:
        worker(options.worker, sizes)
    from anyaccel import launch

    with tempfile.TemporaryDirectory() as folder:
        result_file = str(Path(folder) / "result.json")
        wanted = launch.LaunchOptions(script=__file__, num_accelerators=options.ranks, bind_cores=True)
        command = [sys.executable, __file__, "--worker", result_file, "--max-bytes", str(options.max_bytes)]
        code = launch.launch_local(launch.make_plan(wanted), command)
        if code:
            return code
        result = json.loads(Path(result_file).read_text())
    result["machine"], result["ranks"] = machine(), options.ranks
    if options.json:
        emit_json(result)
        return 0
    print(
        f"all-reduce, {options.ranks} ranks, one core each, median (p99) in µs; x = times ours\n{result['machine']}\n"
    )
    names = list(result["rows"][0]["median_us"])
    lines = []
    for row in result["rows"]:
        ours = row["median_us"]["anyaccel"]
        cells = [f"{row['dtype']} {row['bytes'] >> 10} KB"]
        for name in names:
            cell = f"{row['median_us'][name]:.1f} ({row['p99_us'][name]:.0f})"
            cells.append(cell if name == "anyaccel" else f"{cell} {row['median_us'][name] / ours:.2f}x")
        lines.append(cells)
    print(table(["size", *names], lines))
    for name, why in result["left_out"].items():
        print(f"\n{name} left out: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
