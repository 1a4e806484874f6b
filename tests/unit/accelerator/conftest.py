# SPDX-License-Identifier: Apache-2.0
"""Fixtures that put the accelerator choice back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anyaccel.accelerator import select
from anyaccel.accelerator.backends.cpu import CpuAccelerator


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> CpuAccelerator:
    """A CPU accelerator outside a launched job."""
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return CpuAccelerator()


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a fresh process: nothing chosen. What was chosen before comes back afterwards."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    saved = select._accelerator, select._detection
    select._accelerator = select._detection = None
    yield
    select._accelerator, select._detection = saved
