# SPDX-License-Identifier: Apache-2.0
"""Native ops: builders that load a prebuilt copy or compile one on first use.

`OpBuilder` is the base class and has the contract, `CPUOpBuilder` that of ops for the CPU; `builders_in(package)`
lists the builders of a package. The sets of builders that accelerators offer are in `anyaccel.ops.builders`.
Importing this package does not import torch; names load on first use, the modules `adam`, `adagrad`, `lion`, `aio` and
`builders` too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel.ops import adagrad, adam, aio, builders, lion
    from anyaccel.ops.builder import CPUOpBuilder, OpBuilder, builders_in

_MODULES = ("adagrad", "adam", "aio", "builders", "lion")

__all__ = ["CPUOpBuilder", "OpBuilder", "adagrad", "adam", "aio", "builders", "builders_in", "lion"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object
    if name in _MODULES:
        value = importlib.import_module(f"anyaccel.ops.{name}")
    else:
        value = getattr(importlib.import_module("anyaccel.ops.builder"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
