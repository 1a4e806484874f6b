# SPDX-License-Identifier: Apache-2.0
"""Hybrids with random weights beside a dense model of as many bytes, natively and in transformers: tokens a second.

python benchmarks/hybrids.py [--threads N] [--dtype bf16] [CASE ...]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import machine, median, table

import anyaccel

_SIZES = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
# About as many parameters each.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", {"intermediate_size": 3072, "num_hidden_layers": 12, "head_dim": 64}),
    "gated delta rule": (
        "Qwen3_5TextConfig",
        {
            "intermediate_size": 2560,
            "num_hidden_layers": 12,
            "head_dim": 64,
            "layer_types": _TYPES * 3,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
        },
    ),
    "Mamba-2": (
        "BambaConfig",
        {
            "intermediate_size": 1792,
            "num_hidden_layers": 12,
            "attn_layer_indices": [3, 7, 11],
            "mamba_n_heads": 32,
            "mamba_d_state": 128,
        },
    ),
    "short convolution": (
        "Lfm2Config",
        {
            "intermediate_size": 3072,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 12,
            "layer_types": ["conv", "conv", "conv", "full_attention"] * 3,
        },
    ),
}


def build(case: str, dtype: torch.dtype) -> Any:
    import transformers

    name, more = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_SIZES, **more})
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return median(found)


def rates(model: Any, prompt: int, answer: int, rounds: int) -> tuple[float, float]:
    """Tokens a second of a prompt, and of an answer behind a short one."""
    ids = torch.randint(3, 16000, (1, prompt), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(tokens: int, new: int) -> float:
        part = ids[:, :tokens]
        return seconds(
            lambda: model.generate(part, attention_mask=torch.ones_like(part), max_new_tokens=new, **options), rounds
        )

    first = generate(prompt, 1)
    return prompt / first, answer / (generate(16, answer + 1) - generate(16, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help="of " + ", ".join(CASES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bf16", help="of the native models; transformers' are in bf16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for case in options.cases:
        model = build(case, torch.bfloat16)
        sizes = (options.prompt, options.answer, options.rounds)
        engine = anyaccel.init_inference(copy.deepcopy(model), dtype=options.dtype, threads=options.threads)
        assert engine.runtime == "native"
        prompt, answer = rates(engine, *sizes)
        row = [case, f"{engine.native.model.weight_bytes / 2**20:.0f}", f"{prompt:.0f}", f"{answer:.1f}"]
        del engine
        if not options.without_transformers:
            with torch.inference_mode():
                row += [f"{each:.1f}" for each in rates(model, *sizes)]
        rows.append(row)
    header = ["model", "MiB", "prompt tokens/s", "answer tokens/s"]
    if not options.without_transformers:
        header += ["transformers, prompt", "answer"]
    print(machine())
    print(table(header, rows))


if __name__ == "__main__":
    main()
