# SPDX-License-Identifier: Apache-2.0
"""Builder of the op that locks host memory."""

from __future__ import annotations

from typing import Any, ClassVar

from anyaccel.ops.builder import OpBuilder


class PinMemoryBuilder(OpBuilder):
    """Tensors in locked host memory; load() gives `anyaccel.ops.pin_memory`, which needs no building."""

    NAME: ClassVar[str] = "pin_memory"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_PIN_MEMORY"

    def absolute_name(self) -> str:
        """The module."""
        return "anyaccel.ops.pin_memory"

    def sources(self) -> list[str]:
        """None."""
        return []

    def jit_load(self, verbose: bool = False) -> Any:
        """As load(): there is nothing to build."""
        return self.load(verbose)
