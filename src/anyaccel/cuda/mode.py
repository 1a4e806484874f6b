# SPDX-License-Identifier: Apache-2.0
"""Switches the mode on: once in a process, before the program uses torch."""

from __future__ import annotations

import os

import torch

from anyaccel.cuda import report
from anyaccel.cuda_job import VARIABLE, CudaJobOptions, job_environment

_installed: list[str] = []


def install(options: CudaJobOptions | None = None) -> bool:
    """Let what names CUDA use the accelerator of this machine, also in processes that this one starts.

    Args:
        options: default: those of the environment variable; given later, they replace the first ones.

    Returns:
        Whether anything was changed: not where CUDA itself is there.

    Raises:
        UsageError: the environment variable names an option that does not exist.
    """
    if not _installed and torch.cuda.is_available():
        return False
    from anyaccel.accelerator import get_accelerator
    from anyaccel.cuda import devices, distributed, extensions, functions

    accelerator = get_accelerator()
    if options is not None or not _installed:
        options = CudaJobOptions.parse(os.environ.get(VARIABLE, "")) if options is None else options
        devices.mixed_precision = options.amp
        if (options.report or options.json) and report.recorder is None:
            report.recorder = report.Recorder(accelerator.device_name(), options.json)
        os.environ.update(job_environment(options, os.environ))
    if not _installed:
        _installed.append(accelerator.device_name())
        for part in (functions, devices, distributed, extensions):
            part.install(accelerator)
    return True
