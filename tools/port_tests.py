#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a package's own tests on the CPU before and after `anyaccel port --write`, and records what fails only after it.

    python tools/port_tests.py DIR NAME TEST...     DIR/NAME is an unpacked source archive, TEST a file or folder in it

What the tests need has to be installed (--python names the Python that has it, and anyaccel). The tests that are
named run twice, in the source as it is and in a ported copy (DIR/ported/NAME); options of pytest go behind `--`. With
--package all modules of that folder but its tests are imported as well, before and after; what is not installed is
stood in for. All goes to docs/data/port_tests.json. The exit code is 1 when a test that passed does not pass any more,
or a module that could be imported cannot be; 2 when a run was still going on at its limit (--limit): it is interrupted
then, and what had not ended is not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from port_packages import IMPORTER

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "data" / "port_tests.json"
# Tests whose names are drawn at random have the same ones before and after.
SEEDED = "import random, sys, numpy, pytest; random.seed(0); numpy.random.seed(0); sys.exit(pytest.main(sys.argv[1:]))"
GRACE = 60  # seconds from the interrupt to the end: pytest tears down and writes what it has


def environment(folder: Path) -> dict[str, str]:
    """What the package in this folder is run with."""
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0", **settings}


class Run(NamedTuple):
    """The tests that ended, by their names: passed, failed or skipped; and whether all did, before the limit."""

    cases: dict[str, str]
    whole: bool


def within(limit: float, command: list[str], folder: Path) -> tuple[str, bool]:
    """What a command prints last, and whether it ended within so many seconds; else it is interrupted, then killed."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
        whole = True
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            whole = False
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            # With all that it has started: tests leave servers and pools behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return output.read(), whole


def outcomes(python: str, folder: Path, tests: list[str], limit: float) -> Run:
    """Runs the tests in this folder."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        command = [python, "-c", SEEDED, "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}"]
        command += ["--continue-on-collection-errors"]  # as many as can run
        told, whole = within(limit, [*command, *tests], folder)
        if not report.exists() and whole:
            raise SystemExit(f"pytest did not run in {folder}: {told[-800:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    found = {}
    for case in cases:
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = state
    if not whole:
        print(
            f"{folder}: interrupted at the limit of {limit:g} s; {len(found)} tests had ended, others are not compared"
        )
    return Run(found, whole)


def lost(before: Run, after: Run) -> dict[str, str]:
    """What passed before and does not after, with what became of it; after a whole run also what is no longer there."""
    passed = sorted(name for name, state in before.cases.items() if state == "passed")
    now = {name: after.cases.get(name, "gone" if after.whole else "passed") for name in passed}
    return {name: state for name, state in now.items() if state != "passed"}


def importable(python: str, folder: Path, package: str, limit: float) -> dict[str, str]:
    """The package's modules but for its tests, each with "" or the error of importing it."""
    files = [each.relative_to(folder) for each in sorted((folder / package).rglob("*.py"))]
    modules = [
        ".".join(each.with_suffix("").parts).removesuffix(".__init__")
        for each in files
        if not {"test", "tests"} & set(each.parts) and all(part.isidentifier() for part in each.with_suffix("").parts)
    ]
    told, whole = within(limit, [python, "-c", IMPORTER, package, *modules], folder)
    for line in reversed(told.splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            results: dict[str, str] = json.loads(line)["results"]
            return results
    why = "failed" if whole else f"had not ended after {limit:g} s"
    raise SystemExit(f"the importer {why} in {folder}: {told[-800:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", help="of the folder, which is the package's with its version")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--package", default="", help="the folder whose modules are imported before and after")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--limit",
        type=float,
        default=900,
        help="seconds that the tests may take, before and after; default: %(default)s",
    )
    options = parser.parse_args()
    before, after = options.folder / options.name, options.folder / "ported" / options.name
    shutil.rmtree(after, ignore_errors=True)
    shutil.copytree(before, after, symlinks=True)
    command = [sys.executable, "-m", "anyaccel", "port", "--write", "--json", "."]
    done = subprocess.run(command, cwd=after, capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout)["summary"]
    first, second = (outcomes(options.python, each, options.tests, options.limit) for each in (before, after))
    row = {
        "tests": options.tests,
        "fixed": summary["fixed"],
        "changed": summary["changed"],
        "before": dict(sorted(Counter(first.cases.values()).items())),
        "after": dict(sorted(Counter(second.cases.values()).items())),
        "passed_only_before": lost(first, second),
    }
    whole = first.whole and second.whole
    if not whole:
        row["interrupted_after"] = options.limit
    gone = []
    if options.package:
        old, new = (importable(options.python, folder, options.package, options.limit) for folder in (before, after))
        gone = [name for name, error in old.items() if not error and new.get(name) != ""]
        row["modules"] = {
            "all": len(old),
            "before": sum(not error for error in old.values()),
            "after": sum(not error for error in new.values()),
            "import_only_before": {name: new.get(name, "gone") for name in gone},
        }
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record[options.name] = row
    RESULTS.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    print(options.name, json.dumps(row))
    return 1 if row["passed_only_before"] or gone else 0 if whole else 2


if __name__ == "__main__":
    sys.exit(main())
