# SPDX-License-Identifier: Apache-2.0
"""Machines that boot: one a shape, on which all its cases run. `make test-machines` runs them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from architecture import Missing
from binding import on
from machine import Machine
from shapes import SHAPES

_BY_NAME = {shape.name: shape for shape in SHAPES}
_outcomes: dict[tuple[str, str, str], Counter[str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))
            params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            item.user_properties.append(("machine", params.get("machine", "three hosts")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    if "machine" in properties and (report.when == "call" or report.outcome != "passed"):
        file, _, name = report.nodeid.partition("::")
        case = Path(file).stem, name.partition("[")[0], str(properties["machine"])
        _outcomes.setdefault(case, Counter())[report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Put what was run beside what the file of results has; tools/pages.py makes a table of docs/support.md of it."""
    of_worker = hasattr(session.config, "workerinput")  # of pytest-xdist, which sends its outcomes to the first process
    if of_worker or not (_outcomes and "ANYACCEL_MACHINE_RESULTS" in os.environ):
        return
    path = Path(os.environ["ANYACCEL_MACHINE_RESULTS"])
    there = {
        file.stem: re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
        for file in sorted(Path(__file__).parent.glob("test_*.py"))
    }
    old = json.loads(path.read_text()) if path.exists() else {}
    new: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for file, names in there.items():
        for name in names:
            known = old.get(file, {}).get(name, {})
            run = {machine: dict(found) for (*of, machine), found in _outcomes.items() if of == [file, name]}
            new.setdefault(file, {})[name] = {**known, **run}
    path.write_text(json.dumps(new, indent=1) + "\n")


@pytest.fixture(scope="session", params=on(*_BY_NAME).args[1])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine of each shape in turn; a test that needs one shape names it with `on`."""
    try:
        booted = Machine(_BY_NAME[request.param])
    except Missing as lack:
        pytest.skip(str(lack))
    yield booted
    booted.close()
