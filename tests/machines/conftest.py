# SPDX-License-Identifier: Apache-2.0
"""Machines that boot: one a shape, on which all its cases run. `make test-machines` runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from machine import Machine, Missing
from shapes import SHAPES

_BY_NAME = {shape.name: shape for shape in SHAPES}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", params=_BY_NAME)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine of each shape in turn; a test that needs one shape names it with `on`."""
    try:
        booted = Machine(_BY_NAME[request.param])
    except Missing as lack:
        pytest.skip(str(lack))
    yield booted
    booted.close()
