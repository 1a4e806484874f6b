# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that is several times as large as its bound on memory, against what the disk allows.

The model is a random Qwen3-MoE whose routers prefer some experts, as trained ones do, and reads tokens that are as
frequent as words of a text. Three numbers are measured in turn: the disk's bandwidth (direct reads of pieces as large
as an expert, in random order, from the file of packed weights), tokens a second of the whole model in memory, and
tokens a second with --memory. What the disk allows is bandwidth / (bytes of experts that a token needed and memory did
not have); what is allowed is the smaller one of that and the speed in memory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import emit_json, machine, note, table

VOCABULARY = 4096


def make_model(folder: Path, layers: int, experts: int, hidden: int, features: int, skew: float) -> None:
    """A folder with random weights; routers whose rows have lengths exp(skew * normal) prefer the long ones."""
    import torch
    from safetensors.torch import save_file

    heads, head_dim = 8, hidden // 8
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": features,
        "moe_intermediate_size": features,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random_values = torch.Generator().manual_seed(0)

    def matrix(rows: int, cols: int) -> Any:
        return torch.randn(rows, cols, generator=random_values).mul_(cols**-0.5).to(torch.bfloat16)

    index: dict[str, str] = {}

    def save(name: str, tensors: dict[str, Any]) -> None:
        save_file(tensors, folder / name)
        index.update(dict.fromkeys(tensors, name))

    save(
        "outer.safetensors",
        {
            "model.embed_tokens.weight": matrix(VOCABULARY, hidden) * hidden**0.5,
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        },
    )
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors = {f"{at}{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in _NORMS}
        for name, rows in (("q", heads), ("k", 2), ("v", 2)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows * head_dim, hidden)
        tensors[f"{at}self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim) * 0.5
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = torch.ones(head_dim, dtype=torch.bfloat16)
        lengths = torch.exp(skew * torch.randn(experts, 1, generator=random_values))
        tensors[f"{at}mlp.gate.weight"] = (matrix(experts, hidden) * lengths).to(torch.bfloat16)
        whole = {"gate": matrix(features, hidden), "up": matrix(features, hidden), "down": matrix(hidden, features)}
        for expert in range(experts):  # other rows of one matrix: as good as new ones, and sooner made
            for name, value in whole.items():
                tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = value.roll(expert, 0) * 0.7
        save(f"layer{layer}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


_NORMS = ("input_layernorm", "post_attention_layernorm")


def disk_bandwidth(file: Path, piece: int, seconds: float) -> float:
    """Bytes a second of direct reads of pieces in random order, sixteen at a time."""
    import torch

    from anyaccel.ops.builders.aio import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(1 << 20, 32, False, True, 1)
    buffers = [handle.new_cpu_locked_tensor(piece, torch.empty(0, dtype=torch.uint8)) for _ in range(16)]
    pieces, chooser, total = file.stat().st_size // piece, random.Random(0), 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for buffer in buffers:
            handle.async_pread(buffer, str(file), chooser.randrange(pieces) * piece)
        handle.wait()
        total += piece * len(buffers)
    return total / (time.perf_counter() - begin)


def decode(model: Any, count: int, seed: int) -> float:
    """Seconds a token, of tokens one after another as a text has them: the n-th most frequent one with 1 / n."""
    tokens = random.Random(seed).choices(range(VOCABULARY), [1 / (n + 1) for n in range(VOCABULARY)], k=count)
    values, logits = (ctypes.c_int64 * count)(*tokens), (ctypes.c_float * VOCABULARY)()
    sequence = model.create()
    begin = time.perf_counter()
    for at in range(count):
        model.forward([sequence], [1], ctypes.addressof(values) + 8 * at, ctypes.addressof(logits), [0])
    seconds = time.perf_counter() - begin
    model.destroy(sequence)
    return seconds / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--skew", type=float, default=0.5, help="of the routers' rows")
    parser.add_argument("--times", type=float, default=4, help="the weights, in bounds")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="all in turn; the best of each counts")
    parser.add_argument("--folder", help="where the model is made and kept; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        os.environ["ANYACCEL_CACHE_DIR"] = str(folder / "cache")
        result = measure(folder / "model", options)
    if options.json:
        emit_json(result)
        return
    note(machine())
    rows = [[name, f"{value:.3g}" if isinstance(value, float) else str(value)] for name, value in result.items()]
    print(table(["", ""], rows))


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of the run."""
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions

    if not (folder / "config.json").exists():
        make_model(folder, options.layers, options.experts, options.hidden, options.features, options.skew)
    how = {"dtype": options.dtype, "cache_bytes": 32 << 20, "threads": options.threads}
    whole = load_native(folder, ModelOptions(**how))
    weights = whole.model.weight_bytes
    if whole.saving is not None:
        whole.saving.finish()
    memory = int(weights / options.times)
    native = load_native(folder, ModelOptions(memory=memory + how["cache_bytes"], **how))
    stats = native.model.expert_stats()
    assert stats is not None, "all of it fits: no experts stay in the file"
    expert_bytes = int(stats["slot_bytes"])
    (packed,) = (folder.parent / "cache" / "packed").glob("*/weights")
    decode(native.model, 3 * options.tokens, 7)  # until the hot ones are there
    before = native.model.expert_stats()
    rounds = []
    for each in range(options.rounds):
        rounds.append(
            (
                disk_bandwidth(packed, expert_bytes, 2),
                1 / decode(whole.model, options.tokens, each),
                1 / decode(native.model, options.tokens, each),
            )
        )
        note(
            "GB/s, tokens/s in memory, tokens/s: "
            + ", ".join(f"{n:.3g}" for n in (rounds[-1][0] / 1e9, *rounds[-1][1:]))
        )
    bandwidth, in_memory, speed = (max(each) for each in zip(*rounds, strict=True))
    after = native.model.expert_stats()
    assert before is not None and after is not None
    made = {name: (after[name] - before[name]) for name in after}
    missed = made["missed"] + made["ahead_used"]
    disk = bandwidth / (missed * expert_bytes / (options.tokens * options.rounds))
    return {
        "weights, MiB": weights >> 20,
        "bound, MiB": memory >> 20,
        "expert, MiB": expert_bytes / 2**20,
        "disk, GB/s": bandwidth / 1e9,
        "experts in memory when needed": 1 - missed / made["used"],
        "read ahead, of those that were not": made["ahead_used"] / missed,
        "read in vain, of all bytes": 1 - missed * expert_bytes / made["bytes"],
        "tokens/s in memory": in_memory,
        "tokens/s that the disk allows": disk,
        "tokens/s": speed,
        "of what is allowed": speed / min(disk, in_memory),
    }


if __name__ == "__main__":
    main()
