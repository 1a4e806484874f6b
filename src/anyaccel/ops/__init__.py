# SPDX-License-Identifier: Apache-2.0
"""Native ops: builders that load a prebuilt copy or compile one on first use.

`OpBuilder` is the base class and has the contract, `CPUOpBuilder` that of ops for the CPU; `builders_in(package)`
lists the builders of a package. The sets of builders that accelerators offer are in `anyaccel.ops.builders`.
Importing this package does not import torch; names load on first use.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers take it for True; importing typing would take 7 ms
if TYPE_CHECKING:
    from anyaccel.ops.builder import CPUOpBuilder, OpBuilder, builders_in

__all__ = ["CPUOpBuilder", "OpBuilder", "builders_in"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("anyaccel.ops.builder"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
