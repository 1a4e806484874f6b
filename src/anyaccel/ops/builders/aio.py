# SPDX-License-Identifier: Apache-2.0
"""Builder of the asynchronous file I/O op."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from anyaccel.ops.builders.aio_library import AsyncIOLibraryBuilder


class AsyncIOBuilder(AsyncIOLibraryBuilder):
    """Asynchronous reads and writes of tensors; load() gives `anyaccel.ops.aio`, which has DeepSpeed's names."""

    def wrap(self, op: Any) -> ModuleType:
        """The module `anyaccel.ops.aio`, which calls this library from now on."""
        from anyaccel.ops import aio

        aio.bind(op)
        return aio
