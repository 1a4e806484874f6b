# SPDX-License-Identifier: Apache-2.0
"""`pytest --pyargs anyaccel.accelerator.conformance`: a test for each check, on the accelerator in use.

DS_ACCELERATOR chooses another one.
"""

from __future__ import annotations

import pytest

from anyaccel.accelerator import get_accelerator
from anyaccel.accelerator.conformance.checking import Check
from anyaccel.accelerator.conformance.run import run_check, select_checks, uncovered_methods


@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in select_checks()])
def test_conformance(check: Check) -> None:
    """The check passes, or what it needs is declared absent."""
    result = run_check(check, get_accelerator())
    if result.outcome == "absent":
        pytest.skip(result.detail)
    if result.outcome == "fail":
        pytest.fail(f"{result.detail}\n\n{result.traceback}", pytrace=False)


def test_every_method_is_covered() -> None:
    """The kit knows all of the interface."""
    assert uncovered_methods() == set()
