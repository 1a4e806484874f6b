# SPDX-License-Identifier: Apache-2.0
"""`anyaccel report`: what this machine is, which accelerator is used here, and why."""

from __future__ import annotations

import json
import sys

from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import waiting
from anyaccel.terminal import table_width


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "report",
        "Print versions, the accelerator and why it was chosen, CPU features and topology.",
        "  anyaccel report\n  anyaccel report --json | jq .accelerator.name\n  anyaccel report --no-torch",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--no-torch", action="store_true", help="do not import torch: leaves out the accelerator, takes 0.2 s"
    )
    return parser


def main(argv: list[str]) -> int:
    """Print the report; returns 1 when something cannot be used, which the report explains."""
    options = build_parser().parse_args(argv)

    from anyaccel.accelerator.select import silence_detection
    from anyaccel.report.collect import collect
    from anyaccel.report.render import render

    silence_detection()
    with waiting("looking at this machine and its accelerators"):
        report = collect(with_torch=not options.no_torch)
    print(json.dumps(report, indent=2) if options.json else render(report, table_width(sys.stdout)))
    return int(any("error" in part for part in report.values() if part is not None))
