#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs packages' own tests on this machine: as they are, after `anyaccel port --write`, and unmodified in CUDA mode.

    python tools/port_tests.py DIR --python PYTHON                 all of tools/port_programs/packages.toml
    python tools/port_tests.py DIR --python PYTHON skorch opacus --json results.json --markdown table.md

DIR has each package's source (an unpacked archive of PyPI, or a checkout) in a folder that begins with its name.
PYTHON is one that has anyaccel and what the tests need. A test that passes as it is has to pass in the other two ways;
the exit code is 1 when one does not. What does not pass as it is, and does in CUDA mode, counts as a test that needs a
GPU. Each run ends at --limit seconds; what had not ended then is not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

PACKAGES = Path(__file__).with_name("port_programs") / "packages.toml"
WAYS = ("as-is", "write", "as-cuda")
# Tests whose parameters are drawn at random have the same ones in each way.
SEEDED = "import random, sys, numpy, pytest; random.seed(0); numpy.random.seed(0); sys.exit(pytest.main(sys.argv[1:]))"
GRACE = 30  # seconds from the interrupt to the end: pytest tears down and writes what it has

Cases = dict[str, str]


def run_tests(python: str, folder: Path, way: str, tests: Sequence[str], limit: float) -> tuple[Cases, bool]:
    """The tests that ended, by their names: passed, failed or skipped; and whether all did before the limit."""
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONHASHSEED": "0"}
    settings["PYTHONPATH"] = f"{folder}:{folder}/src"
    environment = {**os.environ, **settings, "EINOPS_TEST_BACKENDS": "torch,numpy"}
    with tempfile.TemporaryDirectory() as place:
        report, script = Path(place, "report.xml"), Path(place, "seeded.py")
        script.write_text(SEEDED)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "addopts=", f"--junitxml={report}"]
        command = [python, *(["-m", "anyaccel.cuda"] if way == "as-cuda" else []), str(script), *options]
        output = Path(place, "output")
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, "--continue-on-collection-errors", *tests], cwd=folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
            whole = _ended(process, limit)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report in {folder}: {output.read_text(errors='replace')[-800:]}")
        found = {}
        cases = ElementTree.parse(report).getroot().iter("testcase")
        for case in (each for each in cases if each.get("name")):  # an interrupted run has one without a name
            kinds = {child.tag for child in case}
            state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{case.get('classname')}::{case.get('name')}"] = state
    return found, whole


def _ended(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Whether a process ends before the limit; else it is interrupted, and killed with all that it has started."""
    try:
        process.wait(limit)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def lost(before: Cases, after: Cases, whole: bool) -> dict[str, str]:
    """What passed before and does not after, with what became of it.

    Where parameters became equal ("cuda" to "cpu"), pytest numbers them: [cpu-1] is [cpu0-1] then.
    """
    after = after | {re.sub(r"(?<=[a-z])0(?=[-\]])", "", name): state for name, state in after.items()}
    now = {name: after.get(name, "gone" if whole else "passed") for name, state in before.items() if state == "passed"}
    return {name: state for name, state in now.items() if state != "passed"}


def measure(package: dict[str, object], folder: Path, python: str, limit: float) -> dict[str, object]:
    """What became of a package's tests in each way."""
    (source,) = (each for each in folder.iterdir() if each.is_dir() and each.name.startswith(str(package["name"])))
    tests = [str(each) for each in package["tests"]]  # type: ignore[attr-defined]
    row: dict[str, object] = {"name": package["name"], "source": source.name}
    runs: dict[str, Cases] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place, source.name)
            shutil.copytree(source, copy, symlinks=True)
            if way == "write":
                command = [python, "-m", "anyaccel", "port", "--write", "--json", "."]
                done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
                row["fixed"] = json.loads(done.stdout)["summary"]["fixed"]
            runs[way], whole = run_tests(python, copy, way, tests, limit)
        row[way] = {state: list(runs[way].values()).count(state) for state in ("passed", "failed", "skipped")}
        row[f"lost {way}"] = lost(runs["as-is"], runs[way], whole)
        if not whole:
            row[f"interrupted {way}"] = True
    gained = (name for name, state in runs["as-cuda"].items() if state == "passed")
    row["need a GPU"] = sum(runs["as-is"].get(name) != "passed" for name in gained)
    return row


def table(rows: Sequence[dict[str, object]]) -> str:
    """The results for people, in Markdown."""
    heads = ["package", "fixes", "pass as they are", "after --write", "lost", "as-cuda", "lost", "more pass as-cuda"]
    lines = [f"| {' | '.join(heads)} |", "| --- " + "| ---: " * (len(heads) - 1) + "|"]
    for row in rows:
        passed = [row[way]["passed"] for way in WAYS]  # type: ignore[index]
        gone = [len(row[f"lost {way}"]) for way in WAYS[1:]]  # type: ignore[arg-type]
        cells = [row["source"], row["fixed"], passed[0], passed[1], gone[0], passed[2], gone[1], row["need a GPU"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--limit", type=float, default=300, help="seconds for each run; default: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    packages = tomllib.loads(PACKAGES.read_text())["package"]
    rows = []
    for package in packages:
        if not options.names or package["name"] in options.names:
            rows.append(measure(package, options.folder, options.python, options.limit))
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(table(rows) + "\n")
    return int(any(row[f"lost {way}"] for row in rows for way in WAYS[1:]))


if __name__ == "__main__":
    sys.exit(main())
