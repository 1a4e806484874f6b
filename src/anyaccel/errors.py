# SPDX-License-Identifier: Apache-2.0
"""The errors that programs catch. Every error that anyaccel raises on purpose derives from `AnyAccelError`.

A message says what was wrong, the value that was seen, and what to do. The CLI prints it as one line without a
traceback and exits with the class's ``exit_code``.
"""

from __future__ import annotations


class AnyAccelError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class UsageError(AnyAccelError, ValueError):
    """What the caller asked for cannot be right: a bad flag, a bad core list, a missing script."""

    exit_code = 2


class ProgramNotFoundError(UsageError):
    """A program that is to be started is not there; the exit code is that of a shell."""

    exit_code = 127


class ProgramNotRunnableError(UsageError):
    """A program that is to be started cannot be run, as it is not executable; the exit code is that of a shell."""

    exit_code = 126


class AcceleratorUnavailableError(AnyAccelError, RuntimeError):
    """An accelerator was asked for by name and cannot be used; the message says what to install."""


class MissingPackageError(AnyAccelError, ModuleNotFoundError):
    """A package that a part of this one needs is not installed; the message names the extra that brings it."""

    def __init__(self, message: str, package: str) -> None:
        super().__init__(message, name=package)

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str, str | None]]:
        return type(self), (str(self), self.name)


class CapabilityError(AnyAccelError, NotImplementedError):
    """The accelerator declares that it lacks a capability.

    Args:
        accelerator: name of the accelerator, for example ``"cpu"``.
        capability: name of the capability, for example ``"register_host_memory"``.
        why: what is missing and, where there is one, what to use instead.
    """

    def __init__(self, accelerator: str, capability: str, why: str) -> None:
        super().__init__(f"accelerator {accelerator!r} does not have {capability!r}: {why}")
        self.accelerator = accelerator
        self.capability = capability


class OpBuildError(AnyAccelError, RuntimeError):
    """An op cannot be built or loaded: no compiler, bad sources, a compiler that failed or did not end in time.

    The message has the command, the last lines of the compiler's output and, where something is missing, what to
    install.
    """


class RollbackError(UsageError, RuntimeError):
    """A step of an optimizer cannot be undone."""


class AioError(AnyAccelError, OSError):
    """A file could not be read or written.

    Attributes:
        errno: of the system call that failed; ENODATA where the file ended too early, ECANCELED for what was given up.
        filename: the file.
        offset: in it, in bytes, where the error was met.
    """

    def __init__(self, number: int, message: str, filename: str, offset: int) -> None:
        super().__init__(number, message, filename)
        self.message = message
        self.offset = offset

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type[AioError], tuple[int | None, str, str, int]]:
        return type(self), (self.errno, self.message, self.filename, self.offset)


class CommError(AnyAccelError, RuntimeError):
    """A collective could not be completed; the group it ran on is not usable any more."""


class NoBackendError(UsageError, RuntimeError):
    """A process group does not work on a device. torch asks for every type of device, and expects a RuntimeError."""


class PeerLostError(CommError):
    """A peer process of a collective has died."""


class CommTimeoutError(CommError, TimeoutError):
    """A peer process of a collective did not come within the deadline."""


class ModelError(AnyAccelError, ValueError):
    """A model, checkpoint or configuration cannot be used; the message names the file and the reason."""


class CompatError(AnyAccelError, RuntimeError):
    """The DeepSpeed alias cannot be put into this environment, or not be taken out of it."""


class NotCoveredError(AnyAccelError, NotImplementedError):
    """A function of DeepSpeed was asked for something that the alias does not do."""


class NotCoveredAttributeError(AnyAccelError, AttributeError):
    """A name of DeepSpeed that the alias does not have."""


class NotCoveredImportError(AnyAccelError, ImportError):
    """A module of DeepSpeed, or a name of one, that the alias does not have."""
