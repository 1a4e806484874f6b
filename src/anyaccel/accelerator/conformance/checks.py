# SPDX-License-Identifier: Apache-2.0
"""Every check, in the order in which they run: importing a subject registers its checks."""

from __future__ import annotations

import importlib

from anyaccel.accelerator.conformance.checking import CHECKS as CHECKS

for _subject in (
    "identity",
    "capabilities",
    "rng",
    "streams",
    "graphs",
    "memory",
    "compute",
    "host",
    "environment",
    "processes",
    "builders",
):
    importlib.import_module(f"anyaccel.accelerator.conformance.{_subject}")
