# SPDX-License-Identifier: Apache-2.0
"""`anyaccel quantize`: a copy of a model with int4 or int8 weights."""

from __future__ import annotations

import json
import sys
from typing import Any

from anyaccel.cli._parser import Parser, size
from anyaccel.cli._screen import Elapsed
from anyaccel.inference.options import GROUP_SIZES
from anyaccel.terminal import moves_cursor

_EXAMPLES = """\
  anyaccel quantize ~/models/SmolLM2-1.7B-Instruct smollm2-int4
  anyaccel quantize ~/models/SmolLM2-1.7B-Instruct smollm2-int4 --calibrate builtin
  anyaccel quantize ~/models/Llama-3.2-1B llama-int4 --calibrate notes.txt --bits 4.5
  anyaccel quantize llama-bf16.gguf llama-q4.gguf --format gguf --calibrate builtin --bits 4.8
  anyaccel quantize llama-bf16.gguf llama-q4.gguf --format gguf --calibrate builtin --size 800MB
  anyaccel quantize story.gguf story-int8 --dtype int8
  anyaccel quantize ~/models/Llama-3.1-8B llama-int4 --group-size 128 --asymmetric --force --json"""


_LEAST_SIZE = 1_000_000  # a smaller number was meant in megabytes


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "quantize",
        "Write a copy of a model with quantised linear layers: safetensors in the layout of compressed-tensors, which "
        "anyaccel, transformers and vLLM read. OUT is complete or does not exist.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Hugging Face model folder or .gguf file")
    add("out", metavar="OUT", help="folder to make; with --format gguf a file")
    add("--dtype", choices=("int4", "int8"), default="int4", help="precision of the weights (default: int4)")
    group = add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=32,
        help="number of weights that share a scale in int4 (default: 32)",
    )
    parser.add_former_name(group, "--group")
    add(
        "--calibrate",
        metavar="TEXT",
        help="text file, or 'builtin': run it through the model to make up for rounding errors (torch; minutes)",
    )
    add(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help="number of tokens of the text to use (default: 16384)",
    )
    add(
        "--bits",
        type=float,
        metavar="B",
        help="with --calibrate: bits for each weight on average; each matrix gets as many as it needs",
    )
    add(
        "--size",
        type=size,
        metavar="SIZE",
        help="largest size of a GGUF file, such as 800MB, instead of --bits; embedding and head take part",
    )
    add(
        "--format",
        choices=("compressed-tensors", "gguf"),
        default="compressed-tensors",
        help="of OUT; gguf: a calibrated copy of a .gguf file in the K types (default: compressed-tensors)",
    )
    add("--asymmetric", action="store_true", help="int4 with a zero point for each group: closer, a little larger")
    add("--force", action="store_true", help="replace OUT when it is a model folder")
    add("--json", action="store_true", help="print one JSON object: sizes, and the error of each matrix")
    add("-q", "--quiet", action="store_true", help="print no progress")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(argv)
    from dataclasses import asdict

    from anyaccel.errors import UsageError
    from anyaccel.inference.quantize import quantize

    if options.size is not None and options.size < _LEAST_SIZE:
        raise UsageError(f"--size {options.size}: so few bytes hold no model; give a size such as 800MB")
    screen = _Screen(not options.quiet)
    try:
        summary = quantize(
            options.model,
            options.out,
            dtype=options.dtype,
            group=options.group_size,
            asymmetric=options.asymmetric,
            calibrate=options.calibrate,
            tokens=options.calibration_tokens,
            bits=options.bits,
            size=options.size,
            format=options.format,
            force=options.force,
            progress=screen.progress,
            announce=screen.line,
        )
    finally:
        screen.close()
    if options.json:
        print(json.dumps(asdict(summary)))
    else:
        print(
            f"{summary.out}: {summary.bytes_before / 2**20:.1f} MiB -> {summary.bytes_after / 2**20:.1f} MiB, "
            f"{len(summary.matrices)} matrices in {summary.dtype}, relative error {summary.relative_error:.4f}, "
            f"{summary.seconds:.1f} s"
        )
        screen.line(f"to run it in {summary.dtype}: anyaccel generate PROMPT --dtype auto --model {summary.out}")
    return 0


class _Screen:
    """Shows progress on standard error."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None
        # This line covers the import of torch and, with --calibrate, the forward passes over its text.
        self._elapsed = Elapsed("preparing") if shown and moves_cursor(sys.stderr) else None

    def line(self, text: str) -> None:
        if self._shown:
            if self._elapsed is not None:
                self._elapsed.clear()
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        """Update the progress bar over the bytes that are read."""
        if not self._shown:
            return
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                self._shown = False
                return
            self._end_elapsed()
            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="quantising", file=sys.stderr, dynamic_ncols=True
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._end_elapsed()
        if self._bar is not None:
            self._bar.close()

    def _end_elapsed(self) -> None:
        if self._elapsed is not None:
            self._elapsed.end()
            self._elapsed = None
