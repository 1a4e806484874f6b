#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Models on their own code beside transformers: prompts and tokens after them, one sequence and eight.

    .venv/bin/python benchmarks/own_code.py              every kind that tools/census.py has found on its own code
    .venv/bin/python benchmarks/own_code.py ctrl doge    some of them; the others stay in the file as they are

A random model of about 100 million parameters each, in fp32 on both sides. They are timed in turn, and a ratio is the
median of the rounds: above 1 we are faster. Ratios go to tests/data/own_code_speed.json, and from there
`python tools/pages.py models` writes them into docs/models.md. What is larger, or wants other sizes, is left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "data" / "own_code_speed.json"
sys.path.insert(0, str(ROOT / "tools"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

import census  # noqa: E402
from anyaccel.inference.families.registry import FAMILIES  # noqa: E402

PROMPT, STEPS, BATCHES = 64, 12, (1, 8)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: all", metavar="TYPE")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("transformers", "anyaccel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    taken = json.loads(census.FILE.read_text())
    of_own_code = [name for name, found in taken.items() if found["way"] == "own code" and name not in FAMILIES]
    known = json.loads(FILE.read_text()) if FILE.is_file() else {}
    for name in options.model_types or of_own_code:
        try:
            found = ratios(name, options.rounds)
        except Exception as error:  # noqa: BLE001  of transformers' code, with any configuration
            print(f"{name:24} {type(error).__name__}: {str(error).splitlines()[0]:.90}", flush=True)
            continue
        print(f"{name:24} " + " ".join(f"{key} {value:<9}" for key, value in found.items()), flush=True)
        known[name] = found
        FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
