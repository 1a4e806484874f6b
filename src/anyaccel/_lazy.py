# SPDX-License-Identifier: Apache-2.0
"""Names of a package that load on first use, so that importing it costs nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # type checkers take it for True; importing typing would take 7 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


def lazy(
    package: str, names: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        names: each one's module.
        modules: submodules that are attributes, too.
    """

    def load(name: str) -> object:
        if name in names:
            value: object = getattr(importlib.import_module(names[name]), name)
        elif name in modules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *names, *modules})
