# SPDX-License-Identifier: Apache-2.0
"""The decoder runtime beside its peers, a table a precision; each contender in fresh processes, in turn.

Rates are tokens a second; x is ours over theirs. Of our own decode rate it says which share of the read bandwidth that
is: packed bytes that a token reads, times tokens a second, over the most that a loop of all threads reads here.
A peer is `DTYPE:PEER[=MODEL]`, as for `anyaccel bench llm --against`; with --tp, `DTYPE:deepspeed` has as many ranks.

  python benchmarks/llm.py --against bf16:hf --against bf16:llama.cpp=smol-bf16.gguf --against int8:openvino=ov-int8 \\
      --python openvino=OV/bin/python
  python benchmarks/llm.py --random-1b /tmp/llama1b --long 256 --against bf16:hf
  python benchmarks/llm.py --dtype bf16 --tp 2 --against bf16:deepspeed --python deepspeed=DS/bin/python
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from _common import emit_json, machine, note, table

from anyaccel.bench.contenders import Contender, Sizes, measure, parse_peer
from anyaccel.bench.report import medians, ratios

_METRICS = ("decode", "prefill", "batch_decode", "peak_memory_mb")


# The shape of a 1.2 B model, and that of Llama 3.1 8B with 4 of its 32 layers.
_SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "head_dim": 128,
        "vocab_size": 128256,
    },
}


def random_model(folder: Path, shape: str) -> Path:
    """A Llama of that shape with random weights in bf16 and SmolLM2's tokenizer; made when it is not there."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from anyaccel.inference.checkpoints.model_path import default_model_file
    from anyaccel.inference.generic.loading import model_folder

    note(f"writing {folder}")
    torch.manual_seed(0)
    config = LlamaConfig(
        **_SHAPES[shape],
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    AutoTokenizer.from_pretrained(model_folder(default_model_file())).save_pretrained(folder)
    return folder


def bytes_a_token(model: str, dtype: str) -> int:
    """Packed bytes that one decode step reads: all but the embedding, of which it reads one row."""
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions

    native = load_native(model, ModelOptions(dtype))
    spec = native.whole_spec
    a_weight = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 1.0}[dtype]  # int4 keeps it in 8 bits
    embedding = 0 if spec.tied else int(spec.vocab * spec.hidden * a_weight)
    return int(native.model.weight_bytes) - embedding


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hugging Face folder or .gguf file; default: SmolLM2-135M-Instruct")
    for shape, name in (("1b", "of 1.2 B parameters"), ("8b", "with 4 layers of Llama 3.1 8B")):
        add(f"--random-{shape}", metavar="FOLDER", help=f"a random model {name}, which is written there first, instead")
    add("--dtype", nargs="*", default=["bf16", "int8", "int4"])
    add("--against", action="append", default=[], metavar="DTYPE:PEER[=MODEL]")
    add("--python", action="append", default=[], metavar="PEER=PATH")
    add("--tp", type=int, default=1, help="also ours with so many ranks of one core each")
    add("--new", type=int, default=128)
    add("--long", type=int, default=1024)
    add("--batch", type=int, default=8)
    add("--repeats", type=int, default=3)
    add("--rounds", type=int, default=2)
    add("--json", action="store_true")
    options = parser.parse_args()
    from anyaccel import _llm
    from anyaccel.inference.checkpoints.model_path import default_model_file

    model = str(options.model or default_model_file())
    for shape in _SHAPES:
        if folder := getattr(options, f"random_{shape}"):
            model = str(random_model(Path(folder), shape))
    pythons = dict(text.split("=", 1) for text in options.python)
    sizes = Sizes(64, options.new, options.long, options.batch, options.repeats)
    results: dict[str, Any] = {}
    for dtype in options.dtype:
        contenders = [Contender("anyaccel", model, dtype)]
        if options.tp > 1:
            contenders.append(Contender("anyaccel", model, dtype, options.tp))
        for text in options.against:
            of, _, peer = text.partition(":")
            if of == dtype:
                contenders.append(parse_peer(peer, model, dtype, options.tp, pythons))
        figures, failures = measure(contenders, sizes, options.rounds, 20_000)
        bandwidth = max(_llm.read_bandwidth(256 << 20, rounds=20) for _ in range(3))
        size = bytes_a_token(model, dtype)
        results[dtype] = {"figures": figures, "failures": failures, "bytes_a_token": size, "bandwidth": bandwidth}
        if options.json:
            continue
        ours = contenders[0].name
        print(f"\n{Path(model).name}, {dtype}; prompt 64, new {sizes.new}, long {sizes.long}, batch {sizes.batch}")
        print(machine())
        middle, better = medians(figures), ratios(figures, ours)
        rows = []
        for name, values in middle.items():
            cells = [name]
            for metric in _METRICS:
                ratio = better.get(name, {}).get(metric)
                cells.append(
                    (f"{values[metric]:.4g}" if metric in values else "-") + (f" {ratio:.2f}x" if ratio else "")
                )
            rows.append(cells)
        print(table(["engine", *_METRICS], rows))
        if "decode" in middle.get(ours, {}):
            rate = middle[ours]["decode"]
            print(f"{size / 1e6:.0f} MB a token: {size * rate / bandwidth:.0%} of {bandwidth / 1e9:.1f} GB/s")
        for name, why in failures.items():
            print(f"{name} left out: {why}")
    if options.json:
        emit_json({"machine": machine(), "model": model, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
