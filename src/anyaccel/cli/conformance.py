# SPDX-License-Identifier: Apache-2.0
"""`anyaccel conformance`: run every method of the accelerator interface on the device of this machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from anyaccel._version import __version__
from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import waiting
from anyaccel.errors import UsageError
from anyaccel.terminal import Table, fitted, table_width

if TYPE_CHECKING:
    from anyaccel.accelerator.base import Accelerator
    from anyaccel.accelerator.conformance.run import Result

_OUTCOMES = ("pass", "absent", "fail")
_HEAD = ("subject", "check", "result", "    time", "detail")
_DETAIL = 40  # the characters that are reserved for the last column


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "conformance",
        "Run every method of the accelerator interface on a live device, and compare types, units and results with\n"
        "what the interface says. What the device declares absent must say so with the documented error.",
        "  anyaccel conformance\n"
        "  anyaccel conformance cuda -k memory\n"
        "  anyaccel conformance --json | jq '.results[] | select(.outcome == \"fail\")'",
    )
    parser.add_argument(
        "name", nargs="?", help="name of an accelerator, as for DS_ACCELERATOR; default: the one in use"
    )
    parser.add_argument(
        "-k", metavar="TEXT", dest="text", help="run only checks with this text in their name or methods"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the traceback of each failure")
    return parser


def main(argv: list[str]) -> int:
    """Run the checks; returns 1 when one fails."""
    options = build_parser().parse_args(argv)
    if options.name:
        os.environ["DS_ACCELERATOR"] = options.name

    with waiting("looking for accelerators"):
        from anyaccel.accelerator import get_accelerator
        from anyaccel.accelerator.conformance.run import run_check, select_checks
        from anyaccel.accelerator.select import silence_detection

        silence_detection()
        accelerator = get_accelerator()
    checks = select_checks(options.text)
    if not checks:
        raise UsageError(f"-k {options.text!r}: no check has this text in its name or methods; without -k all are run")
    results: list[Result] = []
    if not options.json:
        about = _describe(accelerator)
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        head = f"{about['accelerator']} on {about['device']}: {len(checks)} checks; {versions}"
        print(fitted(head, table_width(sys.stdout)))
        # Rows are printed one by one, so the width of the last column is a guess.
        rows = [(check.subject, check.title, _HEAD[2], f"{0:6.2f} s", "word " * (_DETAIL // 5)) for check in checks]
        table = Table([_HEAD, *rows], table_width(sys.stdout))
        print(table.row(_HEAD), flush=True)
    for check in checks:
        with waiting(f"{check.subject}: {check.title}"):
            result = run_check(check, accelerator)
        results.append(result)
        if not options.json:
            row = (result.subject, result.check, result.outcome, f"{result.seconds:6.2f} s", result.detail)
            print(table.row(row), flush=True)
            if options.verbose and result.traceback:
                print(result.traceback, flush=True)
    counts = Counter(result.outcome for result in results)
    if options.json:
        summary = {outcome: counts[outcome] for outcome in _OUTCOMES}
        everything = {**_describe(accelerator), "counts": summary, "results": [result._asdict() for result in results]}
        print(json.dumps(everything, indent=2))
    else:
        print(", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES))
    return 1 if counts["fail"] else 0


def _describe(accelerator: Accelerator) -> dict[str, Any]:
    """The accelerator's name, device and versions, as far as a broken backend can tell them."""
    import torch

    versions = {"anyaccel": __version__, "python": platform.python_version(), "torch": torch.__version__}
    device = ""
    try:
        device = accelerator.current_device_name()
        versions |= accelerator.runtime_versions()
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the checks of these methods report the reason)
        device = device or f"unknown ({type(error).__name__})"
    return {"accelerator": accelerator._name, "device": str(device), "versions": versions}
