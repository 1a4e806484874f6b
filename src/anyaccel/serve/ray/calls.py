# SPDX-License-Identifier: Apache-2.0
"""What an API process and a replica send each other beside chunks: calls one way, errors the other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.serve.interface import DeadlineError, EngineFullError, EngineStoppedError, GrammarError, TooLongError

_KINDS = (
    EngineFullError,
    EngineStoppedError,
    DeadlineError,
    TooLongError,
    GrammarError,
    ModelError,
    UsageError,
    AnyAccelError,
)


@dataclass
class ReplicaCall:
    """A request in flight; only `request` is sent to the replica.

    Attributes:
        tokens: the prompt, and the answer so far.
        avoid: replicas that have failed to answer it.
        replica: the one that it was sent to.
    """

    request: Any
    tokens: list[int] = field(default_factory=list)
    avoid: set[Hashable] = field(default_factory=set)
    replica: Hashable = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaCall, (self.request,)


def portable(error: AnyAccelError) -> AnyAccelError:
    """The error, or the closest one that the API process knows and pickle can restore."""
    if type(error) in _KINDS:
        return error
    return next(kind for kind in (ModelError, UsageError, AnyAccelError) if isinstance(error, kind))(str(error))
