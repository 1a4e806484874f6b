# SPDX-License-Identifier: Apache-2.0
"""Digests of what the collectives of shm and the optimizers compute, to the bit, from inputs that any machine makes.

Their results are defined: sums go in the order of ranks and are rounded once, and no optimizer contracts to a fused
multiply-add. So they are the same on every instruction set, and must be the same after any change of the code.
`python tests/helpers/recorded_bits.py` writes the file anew; it was written by the commit that the file names, which
was before all kernels were written to one vocabulary of vectors (issue 20).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from anyaccel import comm
from anyaccel.ops.adagrad import CPUAdagrad
from anyaccel.ops.adam import CPUAdam
from anyaccel.ops.lion import CPULion

FILE = Path(__file__).parents[1] / "data" / "bits.json"
WORLD_SIZES = (2, 3)
NARROW = (torch.float32, torch.bfloat16, torch.float16)
WIDE = (torch.float64, torch.int8, torch.int32, torch.int64)
# A scalar, a vector's tail, both sides of the limits of small messages of each item's size, and more than a buffer.
SIZES = (1, 77, 4096, 4097, 8192, 8193, 16_384, 16_385, 32_768, 32_769, 300_001)
# What goes into one chunk, and what does not.
MOVED_SIZES = (77, 300_001)
OPTIMIZERS = (
    ("adamw", CPUAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    ("adam", CPUAdam, {"lr": 1e-2, "weight_decay": 0.1, "adamw_mode": False}),
    ("adagrad", CPUAdagrad, {"lr": 1e-2, "weight_decay": 0.1, "lr_decay": 0.1}),
    ("lion", CPULion, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99)}),
)


def numbers(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different sizes, so that another order of a sum shows; by whole numbers, not torch's generator.

    Its streams are not promised to stay.
    """
    mixed = (torch.arange(count) + 1_000_003 * seed) * 6364136223846793005 + 1442695040888963407
    whole = (mixed >> 40) & 0xFFFF
    if not dtype.is_floating_point:
        return (whole - 0x8000).to(dtype)
    powers = torch.tensor([2.0**exponent for exponent in range(-23, -7)])
    return ((whole - 0x8000).float() * powers[(mixed >> 30) & 15]).to(dtype)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bytes of all."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def collectives() -> dict[str, str]:
    """What one rank of a job gets, by collective, operation and type; a collective call."""
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    found = {}
    for dtype in (*NARROW, *WIDE):
        name = str(dtype).removeprefix("torch.")
        given = {size: numbers(rank, size, dtype) for size in SIZES}
        operations = ("SUM", "AVG", "PRODUCT", "MIN", "MAX") if dtype in NARROW else ("SUM", "AVG")
        for operation in operations:
            reduced = [tensor.clone() for tensor in given.values()]
            for tensor in reduced:
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=group)
            found[f"all_reduce {operation} {name}"] = digest(reduced)
        scattered = [torch.empty(size, dtype=dtype) for size in MOVED_SIZES]
        for tensor in scattered:
            dist.reduce_scatter_tensor(tensor, numbers(rank, world * tensor.numel(), dtype), group=group)
        found[f"reduce_scatter SUM {name}"] = digest(scattered)
        gathered = [torch.empty(world * size, dtype=dtype) for size in MOVED_SIZES]
        for tensor in gathered:
            dist.all_gather_into_tensor(tensor, given[tensor.numel() // world], group=group)
        found[f"all_gather {name}"] = digest(gathered)
        if dtype in NARROW:
            symmetric = comm.symm_empty(SIZES[-1], dtype=dtype, group=group)
            symmetric.copy_(given[SIZES[-1]])
            comm.inference_all_reduce(symmetric, group=group)
            found[f"symmetric SUM {name}"] = digest([symmetric])
            normed = []
            for rows in (1, 300):
                partial, residual = (numbers(seed, rows * 100, dtype).view(rows, 100) for seed in (rank, 50))
                comm.all_reduce_add_rms_norm(partial, residual, numbers(60, 100, dtype), 1e-6, group=group)
                normed += [partial, residual]
            found[f"add_rms_norm {name}"] = digest(normed)
    return found


def optimizers() -> dict[str, str]:
    """Parameters and moments after three steps, by optimizer and types."""
    found = {}
    for name, kind, settings in OPTIMIZERS:
        for dtype in NARROW:
            for state_dtype in (torch.float32, torch.bfloat16):
                params = [torch.nn.Parameter(numbers(size, size, dtype)) for size in (1, 31, 1000, 9001)]
                optimizer = kind(params, state_dtype=state_dtype, **settings)
                for step in range(3):
                    for number, param in enumerate(params):
                        param.grad = numbers(100 + 10 * step + number, param.numel(), dtype)
                    optimizer.step()
                moments = [optimizer.state[param][moment] for param in params for moment in optimizer.MOMENTS]
                names = [str(each).removeprefix("torch.") for each in (dtype, state_dtype)]
                found[" ".join([name, *names])] = digest([*params, *moments])
    return found


def _write() -> None:
    import ranks

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    recorded: dict[str, object] = {"commit": commit.strip(), "optimizers": optimizers()}
    for world_size in WORLD_SIZES:
        recorded[f"{world_size} ranks"] = ranks.run(collectives, world_size)
    Path(sys.argv[1] if sys.argv[1:] else FILE).write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import recorded_bits  # under its name: ranks import the function that they run

    recorded_bits._write()
