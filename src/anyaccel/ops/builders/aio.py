# SPDX-License-Identifier: Apache-2.0
"""Builder of the asynchronous file I/O op."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, ClassVar

from anyaccel.ops.builders.in_tree import InTreeBuilder


class AsyncIOBuilder(InTreeBuilder):
    """Asynchronous reads and writes of tensors; load() gives `anyaccel.ops.aio`, which has DeepSpeed's names."""

    NAME: ClassVar[str] = "async_io"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_AIO"

    def why_not(self) -> str:
        """Linux only: the engines are its system calls."""
        if not sys.platform.startswith("linux"):
            return f"it needs Linux, and this is {sys.platform}"
        return super().why_not()

    def load(self, verbose: bool = False) -> Any:
        """The module `anyaccel.ops.aio`, whose native part is loaded."""
        return self._bound(super().load(verbose))

    def jit_load(self, verbose: bool = False) -> Any:
        """The same, with a native part that is built here."""
        return self._bound(super().jit_load(verbose))

    def _bound(self, op: Any) -> ModuleType:
        aio = importlib.import_module("anyaccel.ops.aio")
        if op is not aio:
            aio.bind(op)
        return aio
