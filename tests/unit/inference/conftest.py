# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread_of_torch() -> None:
    """For tiny tensors its threads only wait for each other, and take most of the processor for it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
