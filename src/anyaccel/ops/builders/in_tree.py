# SPDX-License-Identifier: Apache-2.0
"""Base of the builders whose sources are in csrc/."""

from __future__ import annotations

import functools
import platform
from typing import ClassVar

from anyaccel.ops import in_tree, jit
from anyaccel.ops.builder import OpBuilder


class InTreeBuilder(OpBuilder):
    """A plain C library made of the files that `in_tree.SOURCES` lists.

    Attributes:
        LIBRARY: its name there, if it is not `NAME`.
    """

    ACCELERATOR: ClassVar[str] = "cpu"
    LIBRARY: ClassVar[str] = ""

    def library_name(self) -> str:
        """The name in `in_tree.SOURCES`, and of the file."""
        return self.LIBRARY or self.NAME

    def absolute_name(self) -> str:
        """Where the copy of the wheel is."""
        return f"anyaccel.ops.prebuilt.{self.library_name()}"

    def sources(self) -> list[str]:
        """Files below csrc/."""
        return [str(in_tree.root() / file) for file in in_tree.sources(self.library_name())]

    def include_paths(self) -> list[str]:
        """csrc/ itself."""
        return [str(in_tree.root())]

    def cxx_args(self) -> list[str]:
        """The same flags as CMake uses."""
        return list(in_tree.flags())

    def extra_ldflags(self) -> list[str]:
        """The same flags as CMake uses."""
        return list(in_tree.LINK_FLAGS)

    def variant(self) -> str:
        """The variant of the sources here, so that a prebuilt copy of other sources is not used."""
        return _variant(self.library_name())

    def _recipe(self, library_name: str) -> jit.Recipe:
        return super()._recipe(self.library_name())


@functools.cache
def _variant(name: str) -> str:
    folder = in_tree.root()
    return in_tree.variant(name, folder) if folder.is_dir() else platform.machine()
