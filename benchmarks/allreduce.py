# SPDX-License-Identifier: Apache-2.0
"""In-place all-reduce between two ranks of one host, each bound to its own core.

From Python: ours on ordinary and on symmetric tensors, ours through torch.distributed (backend shm), gloo, DeepSpeed's
shared-memory op. For each size they take turns, round by round, in the same processes. From C and C++, in the same run:
Intel MPI, oneCCL, and the floor: what two processes need that do nothing else (benchmarks/native/allreduce_*).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import emit_json, machine, median, note, table

SIZES = (1 << 10, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUNDS = 5
SECONDS = 0.12  # of a contender's turn, at most 2000 calls and at least 5
DTYPES = ("float32", "bfloat16")
NATIVE = Path(__file__).parent / "native"
ORDINARY, SYMMETRIC, TORCH = "anyaccel", "anyaccel, symmetric", "torch, shm"
MPI, CCL = "Intel MPI (C)", "oneCCL (C++)"
FLOORS = {"copying": "floor, copying", "shared": "floor, shared"}

Times = dict[tuple[str, int], tuple[float, float]]  # (dtype, bytes) -> median, 99th percentile in µs


def contenders() -> tuple[dict[str, Callable[..., object]], dict[str, str], object]:
    """Name -> in-place all-reduce, ours first; name -> why a peer is left out; the group of ours."""
    import torch.distributed as dist

    from anyaccel import comm

    comm.init_distributed("gloo")
    group = comm.new_group(backend="shm")
    found: dict[str, Callable[..., object]] = {
        ORDINARY: lambda tensor: comm.inference_all_reduce(tensor, group=group),
        SYMMETRIC: lambda tensor: comm.inference_all_reduce(tensor, group=group),
        TORCH: lambda tensor: dist.all_reduce(tensor, group=group),
        "gloo": dist.all_reduce,
    }
    missing = {}
    try:
        import deepspeed.comm as deepspeed_comm

        deepspeed_comm.init_distributed(dist_backend="gloo", verbose=False)
        found["DeepSpeed"] = deepspeed_comm.inference_all_reduce
    except ImportError as error:
        missing["DeepSpeed"] = f"{error}; make bench-peers"
    return found, missing, group


def worker(result_file: str, sizes: list[int], dtypes: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from anyaccel import comm

    torch.set_num_threads(1)
    found, missing, group = contenders()
    symmetric = comm.symm_empty((max(sizes),), torch.uint8, group)
    clock = time.perf_counter_ns
    rows = []
    for dtype in (getattr(torch, name) for name in dtypes):
        for size in sizes:
            own = torch.ones(size // dtype.itemsize, dtype=dtype)
            tensors = dict.fromkeys(found, own) | {SYMMETRIC: symmetric[:size].view(dtype)}
            calls = {}
            times: dict[str, list[float]] = {name: [] for name in found}
            for name, reduce in found.items():
                tensors[name].fill_(1)
                reduce(tensors[name])
                if not bool((tensors[name] == dist.get_world_size()).all()):
                    missing[name] = f"WRONG SUM for {size} bytes of {dtype}"
                tensors[name].zero_()
                start = clock()
                for _ in range(3):
                    reduce(tensors[name])
                slowest = torch.tensor(float(clock() - start) / 3)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # as many calls on both ranks
                calls[name] = max(5, min(2000, int(SECONDS * 1e9 / float(slowest))))
            for _ in range(ROUNDS):
                for name, reduce in found.items():
                    tensor = tensors[name]
                    dist.barrier()
                    for call in range(-calls[name] // 10, calls[name]):
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


# Peers in C and C++ --------------------------------------------------------------------------------------------


def _compile(words: list[str]) -> str:
    """Why it cannot be compiled; empty when it was."""
    done = subprocess.run(words, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{' '.join(words)}: {done.stderr.strip().splitlines()[-1]}"


def _times(output: str) -> tuple[Times, list[str]]:
    """What a program printed; the sizes whose sum was wrong."""
    times: Times = {}
    wrong = []
    for line in output.splitlines():
        words = line.split()
        if len(words) == 5 and words[4] in ("right", "WRONG"):
            times[words[0], int(words[1])] = float(words[2]), float(words[3])
            if words[4] == "WRONG":
                wrong.append(f"{words[1]} bytes of {words[0]}")
    return times, wrong


def native(peers: Path, folder: Path, sizes: list[int]) -> tuple[dict[str, Times], dict[str, str]]:
    """Times of each program; why one is left out."""
    arguments = [str(size) for size in sizes]
    found: dict[str, Times] = {}
    missing: dict[str, str] = {}

    def run(name: str, command: list[str], **environment: str) -> None:
        note(f"{name} …")
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=os.environ | environment)
        found[name], wrong = _times(done.stdout)
        if done.returncode or not found[name] or wrong:
            missing[name] = f"exit code {done.returncode}; wrong sums: {wrong}; {done.stderr.strip()[-300:]}"

    flags = ["-O3", "-march=native", "-fopenmp-simd"]
    program = str(folder / "floor")
    why = _compile(["gcc", *flags, str(NATIVE / "allreduce_floor.c"), "-o", program])
    for kind, name in FLOORS.items():
        if why:
            missing[name] = why
        else:
            run(name, [program, kind, *arguments])
    launcher, library = peers / "bin" / "mpiexec.hydra", peers / "lib"
    if not launcher.exists():
        missing[MPI] = missing[CCL] = f"no {launcher}; tools/install_test_tools.sh brings it"
        return found, missing
    # The host's shared memory only, each rank on a core of its own.
    environment = {
        "LD_LIBRARY_PATH": f"{library}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}",
        "I_MPI_ROOT": str(peers),
        "I_MPI_FABRICS": "shm",
        "CCL_ATL_TRANSPORT": "mpi",
        "CCL_WORKER_OFFLOAD": "0",
        "CCL_LOG_LEVEL": "error",
    }
    mpirun = [str(launcher), "-n", "2", "-bind-to", "core"]
    include = f"-I{peers / 'include'}"
    program = str(folder / "mpi")
    if why := _compile(
        ["gcc", "-O2", str(NATIVE / "allreduce_mpi.c"), include, f"-L{library}", "-lmpi", "-o", program]
    ):
        missing[MPI] = why
    else:
        run(MPI, [*mpirun, program, *arguments], **environment)
    program = str(folder / "ccl")
    words = ["g++", "-O2", str(NATIVE / "allreduce_ccl.cpp"), include, str(library / "libccl.so.1"), "-o", program]
    if why := _compile(words):
        missing[CCL] = why
    else:
        run(CCL, [*mpirun, program, str(folder / "address"), *arguments], **environment)
    return found, missing


def merge(result: dict, times: dict[str, Times]) -> None:
    """The native programs' figures beside those from Python."""
    for row in result["rows"]:
        for name, found in times.items():
            if (row["dtype"], row["bytes"]) in found:
                row["median_us"][name], row["p99_us"][name] = found[row["dtype"], row["bytes"]]
    floor = next((found for name, found in times.items() if name in FLOORS.values()), {})
    result["flag_us"] = floor.get(("flag", 0), (None,))[0]
    result["memcpy_gb_s"] = {size: 2e-3 * size / us for (what, size), (us, _) in floor.items() if what == "memcpy"}


def text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def show(result: dict) -> None:
    names: list[str] = []
    for row in result["rows"]:
        names += [name for name in row["median_us"] if name not in names]
    ours = [ORDINARY, SYMMETRIC, TORCH]
    print(f"all-reduce, {result['ranks']} ranks, one core each, median (p99) in µs; x = times `{ORDINARY}`")
    print(f"{result['machine']}\n")
    lines = []
    for row in result["rows"]:
        medians, p99 = row["median_us"], row["p99_us"]
        cells = [f"{row['dtype']} {row['bytes'] >> 10} KB"]
        for name in names:
            if name not in medians:
                cells.append("-")
                continue
            ratio = "" if name == ORDINARY else f" {medians[name] / medians[ORDINARY]:.2f}x"
            cells.append(f"{text(medians[name])} ({text(p99[name])}){ratio}")
        lines.append(cells)
    print(table(["size", *names], lines))
    print()
    peers = [name for name in names if name not in ours and name not in FLOORS.values()]
    for row in result["rows"]:
        medians = row["median_us"]
        best = min((name for name in peers if name in medians), key=lambda name: medians[name])
        print(
            f"{row['dtype']} {row['bytes'] >> 10} KB: best peer {best}, {medians[best] / medians[ORDINARY]:.2f} times "
            f"ours, {medians[best] / medians[SYMMETRIC]:.2f} times ours on symmetric tensors"
        )
    if result.get("flag_us"):
        speeds = ", ".join(f"{int(size) >> 10} KB {speed:.1f}" for size, speed in result["memcpy_gb_s"].items())
        print(f"\nflag, half a round trip: {result['flag_us']:.3f} µs; memcpy, both cores at once, GB/s each: {speeds}")
    for name, why in result["left_out"].items():
        print(f"\n{name} left out: {why}")


def main() -> int:
    here = Path(__file__).parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="from Python; the programs in C have two")
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(os.environ.get("CCL_ROOT") or here / ".venv" / "oneccl"),
        help="folder with oneCCL and Intel MPI (tools/install_test_tools.sh)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dtype = options.dtype or list(DTYPES)
    sizes = [size for size in SIZES if size <= options.max_bytes]
    if options.worker:
        worker(options.worker, sizes, options.dtype)
    from anyaccel import launch

    with tempfile.TemporaryDirectory() as folder:
        result_file = str(Path(folder) / "result.json")
        wanted = launch.LaunchOptions(script=__file__, num_accelerators=options.ranks, bind_cores=True)
        command = [sys.executable, __file__, "--worker", result_file, "--max-bytes", str(options.max_bytes)]
        command += [word for name in options.dtype for word in ("--dtype", name)]
        code = launch.launch_local(launch.make_plan(wanted), command)
        if code:
            return code
        result = json.loads(Path(result_file).read_text())
        times, missing = native(options.peers.resolve(), Path(folder), sizes) if options.ranks == 2 else ({}, {})
    result["left_out"] |= missing
    merge(result, times)
    result["machine"], result["ranks"] = machine(), options.ranks
    if options.json:
        emit_json(result)
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
