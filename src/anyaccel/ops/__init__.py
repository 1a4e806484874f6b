# SPDX-License-Identifier: Apache-2.0
"""Native ops: builders that load a prebuilt copy or compile one on first use.

`OpBuilder` is the base class and has the contract, `CPUOpBuilder` that of ops for the CPU; `builders_in(package)`
lists the builders of a package. The sets of builders that accelerators offer are in `anyaccel.ops.builders`.
Importing this package does not import torch; names load on first use, the modules `adam`, `adagrad`, `lion`, `aio` and
`builders` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel._lazy import lazy

if TYPE_CHECKING:
    from anyaccel.ops import adagrad, adam, aio, builders, lion
    from anyaccel.ops.builder import CPUOpBuilder, OpBuilder, builders_in
    from anyaccel.ops.matmul import use_onednn_matmul

__getattr__, __dir__ = lazy(
    __name__,
    dict.fromkeys(("CPUOpBuilder", "OpBuilder", "builders_in"), "anyaccel.ops.builder")
    | {"use_onednn_matmul": "anyaccel.ops.matmul"},
    ("adagrad", "adam", "aio", "builders", "lion"),
)

__all__ = [
    "CPUOpBuilder", "OpBuilder", "adagrad", "adam", "aio", "builders", "builders_in", "lion", "use_onednn_matmul",
]  # fmt: skip
