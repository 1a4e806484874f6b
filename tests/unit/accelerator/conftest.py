# SPDX-License-Identifier: Apache-2.0
"""Fixtures that put the accelerator choice back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from anyaccel.accelerator import select
from anyaccel.accelerator.backends.cpu import CpuAccelerator


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> CpuAccelerator:
    """A CPU accelerator outside a launched job."""
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return CpuAccelerator()


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Keep this thread on one CPU: the kernel counts resident pages per CPU and adds them up now and then."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, [min(allowed)])
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, allowed)


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a fresh process: nothing chosen. What was chosen before comes back afterwards."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    saved = select._accelerator, select._detection
    select._accelerator = select._detection = None
    yield
    select._accelerator, select._detection = saved
