# SPDX-License-Identifier: Apache-2.0
"""Builder of the library of csrc/aio, which `anyaccel.ops.aio` calls."""

from __future__ import annotations

import sys
from typing import ClassVar

from anyaccel.ops.builders.in_tree import InTreeBuilder


class AsyncIOLibraryBuilder(InTreeBuilder):
    """The C library alone; `AsyncIOBuilder` puts the Python module around it."""

    NAME: ClassVar[str] = "async_io"
    BUILD_VAR: ClassVar[str] = "DS_BUILD_AIO"

    def why_not(self) -> str:
        """Linux only: the engines are its system calls."""
        if not sys.platform.startswith("linux"):
            return f"it needs Linux, and this is {sys.platform}"
        return super().why_not()
