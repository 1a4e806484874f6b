# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture beside KTransformers' kernels for CPUs (kt-kernel), layer after layer, in turn.

Layers have random weights in the shape of Qwen3-30B-A3B's; tokens choose their experts evenly. Ours is a whole decoder
around them (attention with one small head, norms, the router), so a little more than theirs. Microseconds are those of
one layer; weights are too many for the caches. Formats as each has them: int4 of ours has groups of 32 with minima
(5 bits a weight), theirs groups of 32 with scales in bf16 (4.5 bits); int8 of both has a scale a row.

  python -m venv KT; KT/bin/pip install torch==2.13.0 kt-kernel
  python benchmarks/experts.py --python KT/bin/python [--tokens 1 8 32 512] [--formats bf16 int8 int4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from _common import emit_json, machine, note, table

SHAPE = {"layers": 2, "experts": 128, "used": 8, "hidden": 2048, "features": 768}

# Run by the Python that has kt-kernel.
_THEIRS = """
import json, os, sys, time
import torch
from kt_kernel import kt_kernel_ext as kt

settings = json.loads(sys.argv[1])
shape, kind, turns = settings["shape"], settings["format"], settings["turns"]
experts, used, hidden, features = (shape[name] for name in ("experts", "used", "hidden", "features"))
infer = kt.CPUInfer(settings["threads"])
order = torch.arange(experts, dtype=torch.int64)
kept = []

def matrix(rows, cols):
    return torch.randn(experts, rows, cols, dtype=torch.bfloat16).mul_(0.02)

def fours(values, group=32):
    split = values.float().view(experts, values.shape[1], -1, group)
    scales = split.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 7
    codes = (split / scales).round().clamp(-8, 7).add(8).to(torch.int32).view(experts, values.shape[1], -1, 8)
    packed = (codes << (4 * torch.arange(8, dtype=torch.int32))).sum(-1, dtype=torch.int32)
    return packed.contiguous(), scales.squeeze(-1).to(torch.bfloat16).contiguous()

def layer():
    config = kt.moe.MOEConfig(experts, used, hidden, features, 0)
    config.max_len = 1024
    config.pool = infer.backend_
    sizes = {"gate": (features, hidden), "up": (features, hidden), "down": (hidden, features)}
    if kind == "int4":
        config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, 32, False
    for name, size in sizes.items():
        values = matrix(*size)
        if kind == "int4":
            values, scales = fours(values)
            kept.append(scales)
            setattr(config, f"{name}_scale", scales.data_ptr())
        kept.append(values)
        setattr(config, f"{name}_proj", values.data_ptr())
    made = getattr(kt.moe, settings["kernel"])(config)
    infer.submit(made.load_weights_task(order.data_ptr()))
    infer.sync()
    kept.clear()
    return made

layers = [layer() for _ in range(shape["layers"])]
found = {}
for tokens in settings["tokens"]:
    count = torch.tensor([tokens])
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    best = []
    for turn in range(turns):
        chosen = torch.rand(tokens, experts).argsort(-1)[:, :used].contiguous()
        weights = torch.rand(tokens, used)
        begin = time.perf_counter()
        for each in layers:
            infer.submit(each.forward_task(count.data_ptr(), used, chosen.data_ptr(), weights.data_ptr(), x.data_ptr(),
                                           out.data_ptr(), False))
            infer.sync()
        best.append((time.perf_counter() - begin) / len(layers))
    found[tokens] = best[2:]
print("FOUND" + json.dumps(found), flush=True)
os._exit(0)
"""


# The kernels that kt-kernel itself takes where there is AVX-512; those of 256 bits were slower in each cell.
_KERNELS = {"int4": "AMXInt4_KGroup_MOE", "int8": "AMXInt8_MOE", "bf16": "AMXBF16_MOE"}


def ours(settings: dict[str, Any]) -> dict[int, list[float]]:
    """Seconds of a layer, of each turn."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions

    shape = settings["shape"]
    config = Qwen3MoeConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["features"],
        moe_intermediate_size=shape["features"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=shape["experts"],
        num_experts_per_tok=shape["used"],
        norm_topk_prob=True,
        vocab_size=1024,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    native = load_native(model, ModelOptions(settings["format"], threads=settings["threads"])).model
    del model
    draws = torch.Generator().manual_seed(0)
    found = {}
    for tokens in settings["tokens"]:
        spent = []
        # Up to 32 tokens are a step of so many sequences, more are a prompt.
        sequences = [native.create() for _ in range(tokens if tokens <= 32 else 1)]
        a_sequence = tokens // len(sequences)
        for _ in range(settings["turns"]):
            ids = torch.randint(0, 1024, (tokens,), generator=draws)
            logits = torch.empty(1, 1024)
            begin = time.perf_counter()
            native.forward(sequences, [a_sequence] * len(sequences), ids.data_ptr(), logits.data_ptr(), [tokens - 1])
            spent.append((time.perf_counter() - begin) / shape["layers"])
            if tokens > 32:
                native.destroy(sequences[0])
                sequences = [native.create()]
        for sequence in sequences:
            native.destroy(sequence)
        found[tokens] = spent[2:]
    return found


def theirs(settings: dict[str, Any], python: str) -> dict[int, list[float]]:
    """The better of one thread and all: one more of its threads spins, which costs time where cores are few."""
    best: dict[int, list[float]] = {}
    for threads in {1, settings["threads"]}:
        told = {**settings, "kernel": _KERNELS[settings["format"]], "threads": threads}
        for tokens, values in with_threads(told, python).items():
            best[tokens] = min(best.get(tokens, values), values, key=statistics.median)
    return best


def with_threads(settings: dict[str, Any], python: str) -> dict[int, list[float]]:
    command = [python, "-c", _THEIRS, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    line = next((line for line in done.stdout.splitlines() if "FOUND" in line), None)
    if line is None:
        raise RuntimeError(f"kt-kernel ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return {int(tokens): values for tokens, values in json.loads(line.partition("FOUND")[2]).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="has kt-kernel")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"], choices=["bf16", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print("FOUND" + json.dumps(ours(json.loads(options.worker))), flush=True)
        return 0
    results: dict[str, dict[str, dict[int, list[float]]]] = {}
    for kind in options.formats:
        settings = {"shape": SHAPE, "format": kind, "tokens": options.tokens, "threads": options.threads}
        settings["turns"] = options.turns
        found: dict[str, dict[int, list[float]]] = {}
        for turn in range(options.rounds):
            for name in ("anyaccel", *(("kt-kernel",) if options.python else ())):
                note(f"{kind}, round {turn + 1} of {options.rounds}: {name}")
                if name == "kt-kernel":
                    figures = theirs(settings, options.python)
                else:
                    command = [sys.executable, __file__, "--worker", json.dumps(settings)]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
                    told = json.loads(done.stdout.partition("FOUND")[2])
                    figures = {int(tokens): values for tokens, values in told.items()}
                for tokens, values in figures.items():
                    found.setdefault(name, {}).setdefault(tokens, []).extend(values)
        results[kind] = found
    if options.json:
        emit_json({"machine": machine(), "shape": SHAPE, "results": results})
        return 0
    rows = []
    for kind, found in results.items():
        for tokens in options.tokens:
            middle = {name: 1e6 * statistics.median(values[tokens]) for name, values in found.items()}
            peer = middle.get("kt-kernel")
            ratio = f"{peer / middle['anyaccel']:.2f}" if peer else ""
            rows.append([f"{kind}, {tokens} tokens", f"{middle['anyaccel']:.0f}", f"{peer or 0:.0f}", ratio])
    print(machine())
    print(table(["a layer's µs", "anyaccel", "kt-kernel", "times as fast"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
