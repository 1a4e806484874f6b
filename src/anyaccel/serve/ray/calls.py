# SPDX-License-Identifier: Apache-2.0
"""The messages between an API process and a replica: calls one way, chunks or failures the other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from anyaccel.errors import AnyAccelError, ModelError, UsageError
from anyaccel.serve import interface as contract

# Some errors have constructor arguments of their own, which pickle would not restore.
_KINDS: tuple[type[AnyAccelError], ...] = (
    contract.EngineStoppedError,
    contract.DeadlineError,
    contract.TooLongError,
    ModelError,
    UsageError,
    AnyAccelError,
)


@dataclass
class Call:
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
        return Call, (self.request,)


@dataclass(frozen=True)
class Failure:
    """An error of a replica's engine."""

    kind: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: AnyAccelError) -> Failure:
        """The message to report for an error."""
        if isinstance(error, contract.GrammarError):
            return cls("GrammarError", str(error).removeprefix(f"{error.param}: "), error.param)
        if isinstance(error, contract.EngineFullError):
            return cls("EngineFullError", str(error), retry_after_s=error.retry_after_s)
        return cls(next(kind.__name__ for kind in _KINDS if isinstance(error, kind)), str(error))

    def error(self) -> AnyAccelError:
        """The error again."""
        if self.kind == "GrammarError":
            return contract.GrammarError(self.param, self.message)
        if self.kind == "EngineFullError":
            return contract.EngineFullError(self.message, self.retry_after_s)
        return next(kind for kind in _KINDS if kind.__name__ == self.kind)(self.message)
