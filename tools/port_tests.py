#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a package's own tests on the CPU before and after `anyaccel port --write`, and records what fails only after it.

    python tools/port_tests.py DIR NAME TEST...     DIR/NAME is an unpacked source archive, TEST a file or folder in it

What the tests need has to be installed (--python names the Python that has it, and anyaccel). The tests that are
named run twice, in the source as it is and in a ported copy (DIR/ported/NAME); options of pytest go behind `--`. With
--package all modules of that folder but its tests are imported as well, before and after; what is not installed is
stood in for. All goes to docs/data/port_tests.json. The exit code is 1 when a test that passed does not pass any more,
or a module that could be imported cannot be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from port_packages import IMPORTER

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "data" / "port_tests.json"


def environment(folder: Path) -> dict[str, str]:
    """What the package in this folder is run with."""
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "PYTHONPATH": str(folder), **settings}


def outcomes(python: str, folder: Path, tests: list[str]) -> dict[str, str]:
    """Which tests passed, failed or were skipped, by their names."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}"]
        command += ["--continue-on-collection-errors"]  # as many as can run
        done = subprocess.run(
            [*command, *tests], cwd=folder, env=environment(folder), capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise SystemExit(f"pytest did not run in {folder}: {(done.stdout + done.stderr)[-800:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    found = {}
    for case in cases:
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = state
    return found


def importable(python: str, folder: Path, package: str) -> dict[str, str]:
    """The package's modules but for its tests, each with "" or the error of importing it."""
    files = [each.relative_to(folder) for each in sorted((folder / package).rglob("*.py"))]
    modules = [
        ".".join(each.with_suffix("").parts).removesuffix(".__init__")
        for each in files
        if not {"test", "tests"} & set(each.parts) and all(part.isidentifier() for part in each.with_suffix("").parts)
    ]
    command = [python, "-c", IMPORTER, package, *modules]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
    try:
        results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])["results"]
    except (IndexError, ValueError):
        raise SystemExit(f"the importer failed in {folder}: {done.stderr[-800:]}") from None
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", help="of the folder, which is the package's with its version")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--package", default="", help="the folder whose modules are imported before and after")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    before, after = options.folder / options.name, options.folder / "ported" / options.name
    shutil.rmtree(after, ignore_errors=True)
    shutil.copytree(before, after, symlinks=True)
    command = [sys.executable, "-m", "anyaccel", "port", "--write", "--json", "."]
    done = subprocess.run(command, cwd=after, capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout)["summary"]
    first = outcomes(options.python, before, options.tests)
    second = outcomes(options.python, after, options.tests)
    lost = sorted(name for name, state in first.items() if state == "passed" and second.get(name) != "passed")
    row = {
        "tests": options.tests,
        "fixed": summary["fixed"],
        "changed": summary["changed"],
        "before": dict(sorted(Counter(first.values()).items())),
        "after": dict(sorted(Counter(second.values()).items())),
        "passed_only_before": {name: second.get(name, "gone") for name in lost},
    }
    gone = []
    if options.package:
        old, new = (importable(options.python, folder, options.package) for folder in (before, after))
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
    return int(bool(lost or gone))


if __name__ == "__main__":
    sys.exit(main())
