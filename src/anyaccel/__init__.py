# SPDX-License-Identifier: Apache-2.0
"""anyaccel: write large-model code once, run it on whatever accelerator the machine has.

Importing this package imports neither torch nor any vendor package; public names load on first use.
"""

from __future__ import annotations

from anyaccel._lazy import lazy
from anyaccel._version import __version__
from anyaccel.errors import AnyAccelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.accelerator import get_accelerator, set_accelerator
    from anyaccel.comm import init_distributed
    from anyaccel.inference import init_inference

__getattr__, __dir__ = lazy(
    __name__,
    {
        "get_accelerator": "anyaccel.accelerator",
        "set_accelerator": "anyaccel.accelerator",
        "init_distributed": "anyaccel.comm",
        "init_inference": "anyaccel.inference",
    },
    ("accelerator", "comm", "inference", "interop", "io", "launch", "ops", "topology"),
)

__all__ = [
    "AnyAccelError",
    "__version__",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "set_accelerator",
]
