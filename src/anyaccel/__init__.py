# SPDX-License-Identifier: Apache-2.0
"""anyaccel: write large-model code once, run it on whatever accelerator the machine has.

Importing this package imports neither torch nor any vendor package; public names load on first use.
"""

from __future__ import annotations

import importlib

from anyaccel._version import __version__
from anyaccel.errors import AnyAccelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.accelerator import get_accelerator, set_accelerator
    from anyaccel.comm import init_distributed
    from anyaccel.inference import init_inference

# Public name -> the module that defines it.
_LAZY = {
    "get_accelerator": "anyaccel.accelerator",
    "set_accelerator": "anyaccel.accelerator",
    "init_distributed": "anyaccel.comm",
    "init_inference": "anyaccel.inference",
}
_SUBPACKAGES = ("accelerator", "comm", "inference", "interop", "io", "launch", "ops", "topology")

__all__ = [
    "AnyAccelError",
    "__version__",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "set_accelerator",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in _SUBPACKAGES:
        value = importlib.import_module(f"anyaccel.{name}")
    else:
        raise AttributeError(f"module 'anyaccel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBPACKAGES})
