# SPDX-License-Identifier: Apache-2.0
"""Builders of the ops that run on the host, whatever the accelerator; names are DeepSpeed's."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.ops.builder import NotBuiltYet


class AsyncIOBuilder(NotBuiltYet):
    """Asynchronous reads and writes of tensors."""

    NAME: ClassVar[str] = "async_io"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_AIO"
    REASON: ClassVar[str] = "this version of anyaccel does not contain the asynchronous file I/O op yet"


class CPUAdamBuilder(NotBuiltYet):
    """Adam on parameters in host memory."""

    NAME: ClassVar[str] = "cpu_adam"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CPU_ADAM"
    REASON: ClassVar[str] = (
        "this version of anyaccel does not contain the Adam op yet; torch.optim.AdamW(fused=True) works on the CPU"
    )


class CPUAdagradBuilder(NotBuiltYet):
    """Adagrad on parameters in host memory."""

    NAME: ClassVar[str] = "cpu_adagrad"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CPU_ADAGRAD"
    REASON: ClassVar[str] = (
        "this version of anyaccel does not contain the Adagrad op yet; torch.optim.Adagrad(fused=True) works on the CPU"
    )


class CPULionBuilder(NotBuiltYet):
    """Lion on parameters in host memory."""

    NAME: ClassVar[str] = "cpu_lion"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_CPU_LION"
    REASON: ClassVar[str] = "this version of anyaccel does not contain the Lion op yet"
