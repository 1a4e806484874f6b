# SPDX-License-Identifier: Apache-2.0
"""Builder of the op that locks host memory."""

from __future__ import annotations

from typing import ClassVar

from anyaccel.ops.builder import PythonOpBuilder


class PinMemoryBuilder(PythonOpBuilder):
    """Tensors in locked host memory; load() gives `anyaccel.ops.pin_memory`, which needs no building."""

    NAME: ClassVar[str] = "pin_memory"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_PIN_MEMORY"
    ACCELERATOR: ClassVar[str] = "host"
    MODULE: ClassVar[str] = "anyaccel.ops.pin_memory"
