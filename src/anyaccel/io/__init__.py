# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files, read and written in parallel: `save(state_dict, path)` and `load(path)`.

Importing this package does not import torch; names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyaccel.io.reading import load
    from anyaccel.io.writing import save

__all__ = ["load", "save"]

_MODULES = {"load": "anyaccel.io.reading", "save": "anyaccel.io.writing"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
