# SPDX-License-Identifier: Apache-2.0
"""What the mode was asked for, which child processes inherit. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from anyaccel.errors import UsageError

VARIABLE = "ANYACCEL_AS_CUDA"
START = Path(__file__).absolute().parent / "cuda" / "start"  # its sitecustomize.py switches the mode on in every Python


@dataclass(frozen=True)
class CudaJobOptions:
    """What `--as-cuda=` and the environment variable name, separated by commas.

    Attributes:
        report: print at exit what was redirected, how and where.
        json: that table as one JSON object.
        amp: mixed precision that the program asks for is used on a CPU too, in bfloat16; else it is off there.
    """

    report: bool = False
    json: bool = False
    amp: bool = False

    @classmethod
    def parse(cls, text: str) -> CudaJobOptions:
        """From "report,amp" and the like; "", "1" and "on" stand for no option.

        Raises:
            UsageError: there is no such option.
        """
        names = {name.strip() for name in text.split(",")} - {"", "1", "on"}
        known = {each.name for each in fields(cls)}
        if names - known:
            raise UsageError(f"as-cuda option {min(names - known)!r}: options are {', '.join(sorted(known))}")
        return cls(**dict.fromkeys(names, True))

    def __str__(self) -> str:
        return ",".join(each.name for each in fields(self) if getattr(self, each.name)) or "on"


def job_environment(options: CudaJobOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which every Python that is started below runs in the mode (but not with -I or -E)."""
    before = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != str(START)]
    return {VARIABLE: str(options), "PYTHONPATH": os.pathsep.join([str(START), *before])}
