# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile out of process groups, works and their helpers, as it is out of those that torch has in C++.

Dynamo looks into every Python function that runs while it is on, also into those that torch calls for a collective
outside the graph. `torch.compiler.disable` would prevent this, but importing it takes a second, and it adds a call to
each function. These are the two marks that it sets: one for frames, and all that they call, and one for inlining.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F")

_SKIP = eval_frame._FrameAction.SKIP
_SKIP_ALL = eval_frame._FrameExecStrategy(_SKIP, _SKIP)


def untraced(function: F) -> F:
    """Make torch.compile run a function of Python, and what it calls, as it is."""
    if isinstance(function, types.FunctionType):
        eval_frame.set_code_exec_strategy(function.__code__, _SKIP_ALL)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class Untraced:
    """A base class whose subclasses' methods and properties are `untraced`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for member in vars(cls).values():
            for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
                untraced(getattr(function, "__func__", function))
