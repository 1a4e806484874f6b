#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models on their own code beside transformers: prompts and tokens after them, one sequence and eight.

    .venv/bin/python benchmarks/own_code.py              every kind that tools/census.py has found on its own code
    .venv/bin/python benchmarks/own_code.py ctrl doge    some of them; the others stay in the file as they are
    .venv/bin/python benchmarks/own_code.py --texts      classifiers and encoders, native ones too: a text, and eight
    .venv/bin/python benchmarks/own_code.py --native     native models beside their own code, a billion parameters, bf16

A random model of about 100 million parameters each, in fp32 on both sides. They are timed in turn, and a ratio is the
median of the rounds, or of texts that of the best times: above 1 we are faster. Results go to tests/data/*_speed.json,
and from there `python tools/pages.py` writes them into docs/models.md and docs/encoders.md. What is larger than 700
million, or wants other sizes, is left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "own_code_speed.json"
TEXTS_FILE = ROOT / "tests" / "data" / "texts_speed.json"
NATIVE_FILE = ROOT / "tests" / "data" / "native_speed.json"
WAYS = ("native", "own code")
sys.path.insert(0, str(ROOT / "tools"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

import census  # noqa: E402
from anyaccel.inference.families.registry import FAMILIES  # noqa: E402

PROMPT, STEPS, BATCHES = 64, 12, (1, 8)
TEXTS = {1: (64,), 8: (64, 10, 32, 24, 48, 16, 64, 40)}  # tokens of each, the others are padding


def seconds(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Of the prompt and of all steps after it, in `generate`."""
    stamps = [time.perf_counter()]

    def stamp(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1 + STEPS,
        min_new_tokens=1 + STEPS,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[stamp],
    )
    return stamps[1] - stamps[0], stamps[-1] - stamps[1]


def ratios(model_type: str, rounds: int) -> dict[str, Any]:
    """Times of transformers by ours: of the prompt and of the steps, with each size of batch."""
    import anyaccel

    torch.manual_seed(0)
    theirs = census.build(model_type, census.MEDIUM)
    ours = anyaccel.init_inference(copy.deepcopy(theirs), dtype="fp32")
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in theirs.parameters())}
    for batch in BATCHES:
        ids = torch.randint(10, 30000, (batch, PROMPT))
        taken = [[seconds(model, ids) for model in (theirs, ours)] for _ in range(rounds + 1)][1:]  # without the first
        for place, name in enumerate(("prompt", "step")):
            ratio = statistics.median(pair[0][place] / pair[1][place] for pair in taken)
            found[f"{name} {batch}"] = round(ratio, 2)
    return found


def ratios_of_texts(model_type: str, rounds: int) -> dict[str, Any]:
    """Times of transformers by ours, the best of the rounds: of one text, and of a padded batch of eight."""
    import anyaccel

    theirs = census.build_of_texts(model_type, census.MEDIUM)
    ours = anyaccel.init_inference(copy.deepcopy(theirs), dtype="fp32")
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in theirs.parameters())}
    for batch, counts in TEXTS.items():
        given = census.padded(theirs.config, torch.randint(10, 30000, (batch, PROMPT)), counts)
        wanted, got = (census.of_texts(model, given) for model in (theirs, ours))  # memory is taken
        if float((got - wanted).abs().max() / wanted.abs().max()) > 1e-3:
            raise ValueError("other logits than transformers'")
        best = [math.inf, math.inf]
        for _ in range(rounds):
            for place, model in enumerate((theirs, ours)):
                begin = time.perf_counter()
                census.of_texts(model, given)
                best[place] = min(best[place], time.perf_counter() - begin)
        found[f"texts {batch}"] = round(best[0] / best[1], 2)
    return found


def rates(model_type: str, rounds: int) -> dict[str, Any]:
    """Tokens a second in bf16, the best of the rounds: natively, as its own code, and of transformers."""
    import anyaccel

    theirs = census.build(model_type, census.LARGE).bfloat16()
    models = {
        runtime: anyaccel.init_inference(copy.deepcopy(theirs), dtype="bf16", runtime=runtime)
        for runtime in ("native", "torch")
    }
    models["transformers"] = theirs
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in theirs.parameters())}
    for batch in BATCHES:
        ids = torch.randint(10, 30000, (batch, PROMPT))
        taken = [{name: seconds(model, ids) for name, model in models.items()} for _ in range(rounds + 1)]
        for name in models:
            prompt, steps = (min(each[name][place] for each in taken[1:]) for place in (0, 1))
            found[f"{name}, prompt {batch}"] = round(batch * PROMPT / prompt, 1)
            found[f"{name}, step {batch}"] = round(batch * STEPS / steps, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: all", metavar="TYPE")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--texts", action="store_true", help="classifiers and encoders")
    which.add_argument("--native", action="store_true", help="native models beside their own code")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("transformers", "anyaccel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if options.native:
        file, measure, default = NATIVE_FILE, rates, ["llama", "gemma2", "gpt_neox", "qwen3_moe"]
    elif options.texts:
        file, measure = TEXTS_FILE, ratios_of_texts
        default = [name for name, found in json.loads(census.TEXTS_FILE.read_text()).items() if found["way"] in WAYS]
    else:
        file, measure = FILE, ratios
        taken = json.loads(census.FILE.read_text())
        default = [name for name, found in taken.items() if found["way"] == "own code" and name not in FAMILIES]
    known = json.loads(file.read_text()) if file.is_file() else {}
    for name in options.model_types or default:
        try:
            found = measure(name, options.rounds)
        except Exception as error:  # noqa: BLE001  of transformers' code, with any configuration
            print(f"{name:24} {type(error).__name__}: {str(error).splitlines()[0]:.90}", flush=True)
            continue
        print(f"{name:24} " + " ".join(f"{key} {value:<9}" for key, value in found.items()), flush=True)
        known[name] = found
        file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
