# SPDX-License-Identifier: Apache-2.0
"""Decode of one model over several hosts, with a delay between them, beside one host and DeepSpeed AutoTP.

  python benchmarks/hosts.py                         # the embedded model: 2 hosts, tensor parallel and in stages
  python benchmarks/hosts.py --hosts 4 --delays 0,50
  python benchmarks/hosts.py --peer .venv-bench/bin/python     # DeepSpeed over the same hosts (make bench-peers)

The hosts are network namespaces of this machine (tools/test_cluster.py; needs root), which share its CPUs: with more
ranks than CPUs the figures are those of ranks that take turns. Where the kernel has netem, the delay is netem's;
elsewhere a library in front of recvmsg (native/delayed_recvmsg.c) keeps back what has come for so long.

The floor of a token is its time on one host with as many ranks, and its delays: two for each layer, and two for
embedding and logits; in stages one for each stage but the first, and one for the way back of the token.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import emit_json, note, table

ROOT = Path(__file__).parents[1]
DELAY_FILE = "ANYACCEL_BENCH_DELAY_FILE"
PROMPT = list(range(200, 240))


# --- in a rank


def set_delay(microseconds: int) -> None:
    """Tell the library in front of recvmsg, in all ranks of the machine."""
    with open(os.environ[DELAY_FILE], "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        memory[:8] = struct.pack("q", microseconds * 1000)


def work(stages: int, tokens: int, delays: list[int]) -> None:
    """A rank: prints tokens/s for each delay."""
    import torch

    import anyaccel
    from anyaccel import comm
    from anyaccel.inference.checkpoints.model_path import default_model_file

    comm.init_distributed()
    rank, size = comm.get_rank(), comm.get_world_size()
    engine = anyaccel.init_inference(
        default_model_file(),
        dtype="bf16",
        runtime="native",
        threads=1,
        tensor_parallel={"tp_size": size // stages},
        pipeline_parallel={"size": stages},
    )
    ids = torch.tensor([PROMPT])

    def generate(count: int) -> float:
        begin = time.perf_counter()
        engine.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - begin

    generate(tokens)
    layers = int(engine.config.num_hidden_layers)
    found = {}
    for delay in delays:
        comm.barrier()
        if rank == 0 and DELAY_FILE in os.environ:
            set_delay(delay)
        comm.barrier()
        # The difference of a long and a short answer is that of its tokens alone.
        found[delay] = min(generate(tokens + 2) - generate(2) for _ in range(3)) / tokens
    comm.barrier()
    if rank == 0:
        os.write(1, (json.dumps({"seconds": found, "layers": layers, "runtime": engine.runtime}) + "\n").encode())


def work_deepspeed(model: str, tokens: int) -> None:
    """A rank of DeepSpeed AutoTP."""
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    size = int(os.environ["WORLD_SIZE"])
    engine = deepspeed.init_inference(whole, dtype=torch.bfloat16, tensor_parallel={"tp_size": size})
    ids = torch.tensor([PROMPT])

    def generate(count: int) -> float:
        begin = time.perf_counter()
        engine.module.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - begin

    generate(2)
    seconds = (generate(tokens + 2) - generate(2)) / tokens
    if os.environ.get("RANK") == "0":
        os.write(1, (json.dumps({"seconds": {"0": seconds}, "runtime": "deepspeed"}) + "\n").encode())
    os._exit(0)  # DeepSpeed leaves threads that abort a normal exit


# --- on the machine


def delaying_library(folder: Path) -> dict[str, str]:
    """Build it; the variables that bring it into ranks."""
    library, file = folder / "delayed_recvmsg.so", folder / "delay"
    source = Path(__file__).parent / "native" / "delayed_recvmsg.c"
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    file.write_bytes(bytes(8))
    return {"LD_PRELOAD": str(library), DELAY_FILE: str(file)}


def job(cluster: Any, slots: list[int], words: list[str], variables: dict[str, str], python: str, limit: float) -> Any:
    """Run this file's worker with `anyaccel run` from the first host; what rank 0 printed."""
    folder = Path(tempfile.mkdtemp(dir=cluster.folder))
    hostfile = folder / "hosts"
    hostfile.write_text(cluster.hostfile(slots, len(slots)))
    exports = [word for name, value in variables.items() for word in ("--export", f"{name}={value}")]
    bind = ["--bind_cores_to_rank"] if sum(slots) <= (os.cpu_count() or 1) and len(slots) == 1 else []
    command = [
        *(python, "-m", "anyaccel", "run", "--hostfile", hostfile, *exports, *bind, "--no_local_rank"),
        *(Path(__file__).resolve(), "--worker", *words),
    ]
    done = cluster[0].run([str(word) for word in command], timeout=limit)
    for line in done.stdout.splitlines():
        if '{"seconds"' in line:
            return json.loads(line[line.index("{") :])
    raise SystemExit(f"no figures came from {' '.join(words)}:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a token: on one host, over hosts with each delay, in stages, and of DeepSpeed."""
    sys.path.append(str(ROOT / "tools"))
    import test_cluster

    if why := test_cluster.missing():
        raise SystemExit(f"hosts.py: {why}")
    count = options.hosts
    spread, delays = [1] * count, ",".join(map(str, options.delays))
    found: dict[str, Any] = {}
    with test_cluster.Cluster(count) as cluster:
        variables = delaying_library(Path(cluster.folder))
        for name, slots, stages, wanted in (
            ("one host", [count], 1, "0"),
            ("tensor parallel", spread, 1, delays),
            ("stages", spread, count, delays),
        ):
            words = ["--stages", str(stages), "--tokens", str(options.tokens), "--delays", wanted]
            found[name] = job(cluster, slots, words, variables, sys.executable, options.limit)
            note(f"{name}: {found[name]}")
        if options.peer:
            words = ["--deepspeed", options.peer_model, "--tokens", str(options.peer_tokens)]
            found["DeepSpeed"] = job(cluster, spread, words, {}, options.peer, options.limit)
            note(f"DeepSpeed: {found['DeepSpeed']}")
    return found


def show(found: dict[str, Any], hosts: int) -> str:
    """The table."""
    one = found["one host"]["seconds"]["0"]
    layers = found["one host"]["layers"]
    rows = [["on one host", "", f"{1 / one:.1f}", f"{one * 1e3:.2f}", "", ""]]
    for name, delays in (("tensor parallel", 2 * layers + 2), ("stages", hosts)):
        for delay, seconds in found[name]["seconds"].items():
            floor = one + int(delay) * 1e-6 * delays
            row = [f"{name}, {hosts} hosts", f"{delay} µs", f"{1 / seconds:.1f}", f"{seconds * 1e3:.2f}"]
            rows.append([*row, f"{floor * 1e3:.2f}", f"{seconds / floor:.2f}"])
    if "DeepSpeed" in found:
        seconds = found["DeepSpeed"]["seconds"]["0"]
        rows.append([f"DeepSpeed AutoTP, {hosts} hosts", "0 µs", f"{1 / seconds:.2f}", f"{seconds * 1e3:.0f}", "", ""])
    return table(["ranks", "delay", "tokens/s", "ms a token", "floor, ms", "times floor"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--delays", type=lambda text: [int(part) for part in text.split(",")], default=[0, 20, 50, 200])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--peer", help="a Python with DeepSpeed")
    parser.add_argument("--peer-model", default="", help="the same model as a Hugging Face folder")
    parser.add_argument("--peer-tokens", type=int, default=6)
    parser.add_argument("--limit", type=float, default=300, help="seconds of one job")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deepspeed:
        work_deepspeed(options.deepspeed, options.tokens)
    elif options.worker:
        work(options.stages, options.tokens, options.delays)
    else:
        if options.peer and not Path(options.peer_model, "config.json").exists():
            parser.error("--peer needs --peer-model, a folder with config.json")
        found = measure(options)
        emit_json(found) if options.json else print(show(found, options.hosts))


if __name__ == "__main__":
    main()
