# SPDX-License-Identifier: Apache-2.0
"""Tensors in safetensors files, read and written in parallel: `save(state_dict, path)` and `load(path)`.

Importing this package does not import torch; names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyaccel._lazy import lazy

if TYPE_CHECKING:
    from anyaccel.io.reading import load
    from anyaccel.io.writing import save

__all__ = ["load", "save"]

__getattr__, __dir__ = lazy(__name__, {"load": "anyaccel.io.reading", "save": "anyaccel.io.writing"})
