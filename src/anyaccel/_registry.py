# SPDX-License-Identifier: Apache-2.0
"""The one registry: named, lazily loaded factories, extended by other packages through entry points."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RegistryEntry(Generic[T]):
    """One registered factory.

    Attributes:
        name: what users type.
        target: ``"package.module:attribute"``, imported on first use.
        origin: ``"anyaccel"``, or the distribution whose entry point brought it.
    """

    name: str
    target: str
    origin: str

    def load(self) -> T:
        """Import and return the registered object.

        Raises:
            ImportError, AttributeError, or whatever the module raises at import: the caller decides.
        """
        module, _, attribute = self.target.partition(":")
        value: T = getattr(importlib.import_module(module), attribute)
        return value


class Registry(Generic[T]):
    """Named factories of one kind, ours first and then those of installed extensions.

    Args:
        group: entry-point group that extensions use, for example ``"anyaccel.accelerators"``.
        builtin: our own entries, name -> ``"module:attribute"``, in order.
    """

    def __init__(self, group: str, builtin: dict[str, str]) -> None:
        self.group = group
        self._entries = {name: RegistryEntry[T](name, target, "anyaccel") for name, target in builtin.items()}
        self._extensions_read = False

    def _read_extensions(self) -> None:
        if self._extensions_read:
            return
        from importlib.metadata import entry_points  # 15 ms; only when the registry is used

        for point in entry_points(group=self.group):
            origin = point.dist.name if point.dist is not None else point.module
            # Ours cannot be replaced silently: set_accelerator() and its like do that explicitly.
            self._entries.setdefault(point.name, RegistryEntry[T](point.name, point.value, origin))
        self._extensions_read = True  # last: another thread may be looking

    def names(self) -> list[str]:
        """Names in order: ours, then extensions."""
        self._read_extensions()
        return list(self._entries)

    def __iter__(self) -> Iterator[RegistryEntry[T]]:
        self._read_extensions()
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        self._read_extensions()
        return name in self._entries

    def __getitem__(self, name: str) -> RegistryEntry[T]:
        """The entry called `name`.

        Raises:
            KeyError: nothing of that name is registered.
        """
        self._read_extensions()
        return self._entries[name]
