# SPDX-License-Identifier: Apache-2.0
"""Names of a package that load on first use, so that importing it costs nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # type checkers take it for True; importing typing would take 7 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


def _say_what_to_install(wanted: str, error: ModuleNotFoundError) -> None:
    """Raise what names the extra that brings the missing package, where one does."""
    from anyaccel.errors import AnyAccelError, MissingPackageError
    from anyaccel.extras import EXTRA_OF, pip_line

    package = (error.name or "").partition(".")[0]
    if package in EXTRA_OF and not isinstance(error, AnyAccelError):
        message = f"{wanted} needs {package}, which is not installed: {pip_line(package)}"
        raise MissingPackageError(message, package) from error


def lazy(
    package: str, names: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        names: each one's module.
        modules: submodules that are attributes, too.
    """

    def load(name: str) -> object:
        try:
            if name in names:
                value: object = getattr(importlib.import_module(names[name]), name)
            elif name in modules:
                value = importlib.import_module(f"{package}.{name}")
            else:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
        except ModuleNotFoundError as error:
            _say_what_to_install(f"{package}.{name}", error)
            raise
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *names, *modules})
