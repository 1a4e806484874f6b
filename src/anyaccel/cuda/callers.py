# SPDX-License-Identifier: Apache-2.0
"""Who asks: torch's own code always gets the truth about CUDA, everybody else the accelerator's answer.

torch decides by these answers which of its own code can run (inductor's backends, pinned memory of loaders, fused
optimizers), and that code would call the driver.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

# accelerate places models on devices (device_map="auto"): it knows all accelerators, and names CUDA's by index. faiss
# gives a tensor's memory to its own code for the CPU or for CUDA.
_KNOWING = ("torch.", "anyaccel.", "accelerate.utils.modeling", "faiss.")
# The compiler where it speaks for the user: its stand-ins for what a function asks, and the guards that ask it again,
# which are run from `eval_frame`.
_FOR_USERS = ("torch._dynamo.variables", "torch._dynamo.guards", "torch._dynamo.eval_frame")


def asked_by_torch(depth: int = 2) -> bool:
    """Whether the caller, so many frames up, is torch, this package, or another that is told the truth."""
    name: str = sys._getframe(depth).f_globals.get("__name__") or ""
    if not name.startswith(_KNOWING) and name != "torch":
        return False
    return not name.startswith(_FOR_USERS)


def for_users(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """`replacement` for everybody but torch, which keeps `original`."""

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        if asked_by_torch():
            return original(*args, **kwargs)
        return replacement(*args, **kwargs)

    return answer
