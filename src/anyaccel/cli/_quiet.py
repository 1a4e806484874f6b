# SPDX-License-Identifier: Apache-2.0
"""What commands leave out of stderr."""

from __future__ import annotations

import logging


def silence_detection() -> None:
    """No warning that the accelerator is the CPU: the command itself says which one it uses, or reports on it."""
    logging.getLogger("anyaccel.accelerator.select").setLevel(logging.ERROR)
