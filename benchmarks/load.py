# SPDX-License-Identifier: Apache-2.0
"""Loading a model's file: anyaccel.io.load against safetensors and torch.load, from the disk and from the page cache.

All take turns within each round, since the speed of a disk drifts. Several of them map the file, which reads nothing:
so everybody also looks at one byte of every page, and without that there is only the time until the call returns.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from _common import emit_json, machine, median, note, table
from aio import drop_pages, timed_readinto
from safetensors.torch import load_file, save_file

from anyaccel.io import load, save

Tensors = Mapping[str, torch.Tensor]
PAGE = 4096


def touch(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.flatten().view(torch.uint8)[::PAGE].sum()


def model(num_bytes: int) -> dict[str, torch.Tensor]:
    """Weights as in a language model, bf16: many matrices of several sizes, and small vectors."""
    tensors: dict[str, torch.Tensor] = {}
    left = num_bytes // 2
    layer = 0
    while left > 0:
        for name, count in (("up", 6 << 20), ("down", 6 << 20), ("q", 2 << 20), ("k", 1 << 19), ("norm", 1024)):
            count = min(count, left)
            if count:
                tensors[f"layers.{layer}.{name}"] = torch.randn(count).to(torch.bfloat16)
            left -= count
        layer += 1
    return tensors


def contenders(files: Mapping[str, str], targets: Tensors) -> dict[str, dict[str, tuple[str, Callable[[], Tensors]]]]:
    """What is compared -> who -> (file, call)."""
    ours, theirs, pickled = files["ours"], files["safetensors"], files["torch"]

    def copied() -> Tensors:
        for name, tensor in load_file(theirs).items():
            targets[name].copy_(tensor)
        return targets

    plain = {
        "anyaccel.io.load": (ours, lambda: load(ours, progress=False)),
        "safetensors load_file": (theirs, lambda: load_file(theirs)),
        "torch.load": (pickled, lambda: torch.load(pickled, weights_only=True)),
        "torch.load, mmap": (pickled, lambda: torch.load(pickled, weights_only=True, mmap=True)),
    }
    filled = {
        "anyaccel.io.load": (ours, lambda: load(ours, tensors=targets, progress=False)),
        "load_file and copy_()": (theirs, copied),
    }
    return {"new tensors": plain, "existing tensors": filled}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="of the model, in MiB")
    parser.add_argument("--dir", type=Path, help="folder for the files; default: the current one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.dir or Path.cwd()
    if shutil.disk_usage(folder).free < 4 * (options.size << 20):
        parser.error(f"{folder} has less than {4 * options.size} MiB free; use --dir or --size")
    with tempfile.TemporaryDirectory(dir=folder, prefix="load-") as name:
        tensors = model(options.size << 20)
        size = sum(tensor.nbytes for tensor in tensors.values())
        files = {who: f"{name}/{who}" for who in ("ours", "safetensors", "torch")}
        times: dict[str, list[float]] = {}
        writers: dict[str, Callable[[Tensors], object]] = {
            "anyaccel.io.save": lambda tensors: save(tensors, files["ours"], progress=False),
            "safetensors save_file": lambda tensors: save_file(dict(tensors), files["safetensors"]),
            "torch.save": lambda tensors: torch.save(tensors, files["torch"]),
        }
        for round_number in range(-1, min(2, options.rounds)):
            for who, write in writers.items():
                start = time.perf_counter()
                write(tensors)
                drop_pages(files[{"a": "ours", "s": "safetensors", "t": "torch"}[who[0]]])  # with fsync
                if round_number >= 0:
                    times.setdefault(f"save and sync||{who}", []).append(time.perf_counter() - start)
        limit = "readinto() of the same bytes"
        targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        del tensors
        runs = contenders(files, targets)
        for round_number in range(-1, options.rounds):  # the first round only warms up
            for cache in ("cold", "warm"):
                seconds = timed_readinto(files["ours"], size, cold=cache == "cold")
                if round_number >= 0:
                    times.setdefault(f"{cache}||{limit}", []).append(seconds)
                for what, people in runs.items():
                    for who, (file, call) in people.items():
                        drop_pages(file)
                        if cache == "warm":  # everybody's pages come the same way: their size depends on it
                            Path(file).read_bytes()
                        start = time.perf_counter()
                        found = call()
                        returned = time.perf_counter() - start
                        touch(found)
                        used = time.perf_counter() - start
                        del found
                        if round_number >= 0:
                            times.setdefault(f"{cache}|{what}, used|{who}", []).append(used)
                            times.setdefault(f"{cache}|{what}, returned|{who}", []).append(returned)
            note(f"round {round_number + 1} of {options.rounds}")
    if options.json:
        emit_json({"machine": machine(), "bytes": size, "seconds": times})
        return 0
    print(f"{options.size} MiB of bf16, {options.rounds} rounds\n{machine()}\n")
    rows = []
    for key, values in times.items():
        cache, what, who = key.split("|")
        ours = times.get(f"{cache}|{what}|anyaccel.io.{'save' if 'save' in cache else 'load'}")
        ratio = f"{median(values) / median(ours):.2f}" if ours and not who.startswith("anyaccel") else ""
        rows.append(
            [f"{cache} {what}".strip(), who, f"{median(values):.3f}", f"{size / median(values) / 1e9:.2f}", ratio]
        )
    print(table(["", "", "s", "GB/s", "its time / ours"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
