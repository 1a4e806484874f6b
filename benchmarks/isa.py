# SPDX-License-Identifier: Apache-2.0
"""Every variant of our kernels that this machine can run, beside its peers, in each precision.

Prints a block named after the processor, and with --write puts it into benchmarks/results/variants.md, in the place
of an older one of that processor. Rates are tokens a second, medians; all contenders take turns, each in fresh
processes. llama.cpp runs the model's own file where llama-bench is found (PATH, or LLAMACPP_BIN) and that is a GGUF
file; peers with models of their own are given as for benchmarks/llm.py.

  make bench-isa
  make bench-isa ARGS="--model L --against int8:llama.cpp=L-Q8_0.gguf --against int8:openvino=ov-int8 \\
      --python openvino=OV/bin/python"
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import machine, note, table

from anyaccel.bench.contenders import Contender, Sizes, parse_peer, run
from anyaccel.bench.report import medians
from anyaccel.env import ISA_NAMES
from anyaccel.errors import AnyAccelError, UsageError

PAGE = Path(__file__).parents[1] / "benchmarks" / "results" / "variants.md"
SECTION = "<!-- blocks of benchmarks/isa.py, one a processor -->\n"
_METRICS = {"decode": "decode", "batch_decode": "decode of {batch}", "prefill": "prefill {long}"}
# Nothing of theirs is in products of bf16.
_INTEGERS_ONLY = ("avx_vnni", "avx512_vnni")
_REFERENCES = ("scalar", "portable")


def variants() -> list[str]:
    """Those that this machine runs; what they are compared with in tests is left out."""
    found = []
    for name in ISA_NAMES:
        script = "from anyaccel import _native; print(_native.isa())"
        environment = {**os.environ, "ANYACCEL_ISA": name}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        if done.stdout.strip() == name and name not in _REFERENCES:
            found.append(name)
    return found or [_REFERENCES[-1]]


def contenders(
    model: str, dtypes: Sequence[str], isas: Sequence[str], against: Sequence[str], pythons: dict[str, str]
) -> list[tuple[str, str, Contender]]:
    """(precision, variant or "", contender), in the order of the table."""
    found = []
    for dtype in dtypes:
        for isa in isas:
            if dtype != "bf16" or isa not in _INTEGERS_ONLY:
                found.append((dtype, isa, Contender("anyaccel", model, dtype, label=f"{dtype}, {isa}")))
        for text in against:
            of, _, peer = text.partition(":")
            if of == dtype:
                found.append((dtype, "", parse_peer(peer, model, dtype, 1, pythons)))
    if model.endswith(".gguf") and not any("llama.cpp" in text for text in against):
        try:
            found.append(("int4", "", parse_peer(f"llama.cpp={model}", model, "int4", 1, pythons)))
        except UsageError as error:
            note(f"left out: {error}")
    return found


def measure(
    all_of_them: Sequence[tuple[str, str, Contender]], sizes: Sizes, rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Figures by name, and why some have none."""
    figures: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for _, isa, contender in all_of_them:
            if contender.name in failures:
                continue
            note(f"round {number + 1} of {rounds}: {contender.name}")
            before = os.environ.pop("ANYACCEL_ISA", None)
            if isa:
                os.environ["ANYACCEL_ISA"] = isa
            try:
                found = run(contender, sizes, 20_000)
            except AnyAccelError as error:
                failures[contender.name] = str(error)
                note(f"left out: {error}")
                continue
            finally:
                os.environ.pop("ANYACCEL_ISA", None)
                if before is not None:
                    os.environ["ANYACCEL_ISA"] = before
            for metric, values in found.items():
                figures.setdefault(contender.name, {}).setdefault(metric, []).extend(values)
    return figures, failures


def rows(
    all_of_them: Sequence[tuple[str, str, Contender]], middle: dict[str, dict[str, float]], chosen: str
) -> list[list[str]]:
    """A contender a row; in brackets how many times faster the variant is that runs when nobody chooses."""
    result = []
    below = ISA_NAMES[: ISA_NAMES.index(chosen) + 1]
    for dtype, _, contender in all_of_them:
        if contender.name not in middle:
            continue
        mine = [other for of, name, other in all_of_them if of == dtype and name in below]
        ours = middle.get(mine[-1].name, {}) if mine else {}
        cells = [contender.name + (" (chosen)" if mine and contender is mine[-1] else "")]
        for metric in _METRICS:
            value, own = middle[contender.name].get(metric), ours.get(metric)
            ratio = f" ({own / value:.2f})" if value and own and contender is not mine[-1] else ""
            cells.append(f"{value:.4g}{ratio}" if value else "-")
        result.append(cells)
    return result


def processor() -> str:
    """Its name, as the block has it."""
    return machine().partition(" (")[0]


def put_block(page: str, name: str, block: str) -> str:
    """The page with this processor's block new, in the place of its old one or behind the last."""
    whole = f"<!-- isa: {name} -->\n{block.strip()}\n<!-- end of isa -->\n"
    old = re.compile(rf"<!-- isa: {re.escape(name)} -->\n.*?<!-- end of isa -->\n", re.DOTALL)
    if old.search(page):
        return old.sub(lambda _: whole, page)
    last = page.rfind("<!-- end of isa -->\n")
    at = last + len("<!-- end of isa -->\n") if last >= 0 else page.index(SECTION) + len(SECTION)
    return f"{page[:at]}\n{whole}{page[at:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="Hugging Face folder or .gguf file; default: SmolLM2-135M-Instruct")
    add("--dtype", nargs="*", default=["bf16", "int8", "int4"])
    add("--isa", nargs="*", help="variants; default: all that this machine runs")
    add("--against", action="append", default=[], metavar="DTYPE:PEER[=MODEL]")
    add("--python", action="append", default=[], metavar="PEER=PATH")
    add("--new", type=int, default=64)
    add("--long", type=int, default=1024)
    add("--batch", type=int, default=8)
    add("--repeats", type=int, default=2)
    add("--rounds", type=int, default=2)
    add("--write", action="store_true", help="the block into benchmarks/results/variants.md")
    options = parser.parse_args()
    from anyaccel import _llm, _native
    from anyaccel.inference.checkpoints.model_path import default_model_file

    model = str(options.model or default_model_file())
    pythons = dict(text.split("=", 1) for text in options.python)
    sizes = Sizes(64, options.new, options.long, options.batch, options.repeats)
    taking_part = contenders(model, options.dtype, options.isa or variants(), options.against, pythons)
    figures, failures = measure(taking_part, sizes, options.rounds)
    middle: dict[str, Any] = medians(figures)
    names = [text.format(batch=options.batch, long=options.long) for text in _METRICS.values()]
    block = "\n\n".join(
        [
            f"### {processor()}, {Path(model).stem}",
            f"{machine()}. Prompt 64, {sizes.new} new tokens; medians of {options.repeats * options.rounds}. "
            "In brackets: the rate of the variant that is chosen over this one. "
            f"All threads read {_llm.read_bandwidth(256 << 20) / 1e9:.1f} GB/s; load average at the end "
            f"{os.getloadavg()[0]:.1f}.",
            table(["engine", *names], rows(taking_part, middle, _native.isa())),
            *(f"{name} left out: {why}" for name, why in failures.items()),
        ]
    )
    print(block)
    if options.write:
        PAGE.write_text(put_block(PAGE.read_text(), f"{processor()}, {Path(model).stem}", block))
    return 0


if __name__ == "__main__":
    sys.exit(main())
