# SPDX-License-Identifier: Apache-2.0
"""Finds out which ancestor process has set a variable, as nested launchers pass on each other's variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# No chain of launchers is longer, and the walk must end even if /proc changes meanwhile.
_MOST = 256
# Set by `anyaccel run` (and by DeepSpeed's launcher), and by no other launcher.
RUN = "CROSS_SIZE"
# The variable in which `anyaccel bind` tells a nested one the rank and CPUs that it has given to this process.
BOUND = "ANYACCEL_BOUND"
# The OpenMP variables that both set.
_OPENMP = ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND")


@dataclass(frozen=True)
class Ancestor:
    """One process above this one.

    Attributes:
        pid: its process id.
        environ: the environment that it was started with; None if it may not be read (a daemon of another user).
    """

    pid: int
    environ: Mapping[str, str] | None


class Ancestors:
    """The environment of this process and of those above it.

    Args:
        environ: the environment of this process.
        above: its ancestors, the parent first.
        at_start: the environment that this process was started with; default: the present one.
    """

    def __init__(
        self, environ: Mapping[str, str], above: Sequence[Ancestor], at_start: Mapping[str, str] | None = None
    ) -> None:
        self._environ = environ
        self._above = tuple(above)
        self._at_start = environ if at_start is None else at_start

    def changed_here(self, names: Iterable[str]) -> bool:
        """Whether this process itself has set any of these variables since it was started."""
        return any(self._environ.get(name) != self._at_start.get(name) for name in names)

    def generation(self, names: Iterable[str]) -> int:
        """How many ancestors, from the parent on, have the same values of these variables as this process.

        If all known ancestors have them, the values come from outside of what can be seen.
        """
        names = tuple(names)
        own = [self._environ.get(name) for name in names]
        for generation, ancestor in enumerate(self._above):
            if ancestor.environ is None or [ancestor.environ.get(name) for name in names] != own:
                return generation
        return len(self._above)

    def setter(self, name: str) -> int | None:
        """The ancestor that has given this variable to its child; None if it cannot be seen."""
        generation = self.generation((name,))
        return self._above[generation].pid if generation < len(self._above) else None


def read_ancestors(environ: Mapping[str, str]) -> Ancestors | None:
    """The ancestors of this process, as far as /proc shows them; None without a /proc of this PID namespace.

    Args:
        environ: the present environment of this process, which may have changed since it was started.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        with open("/proc/self/environ", "rb") as file:
            at_start = _parse(file.read())
    except OSError:
        return None
    above: list[Ancestor] = []
    pid = os.getppid()
    while pid and len(above) < _MOST:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = _parse(file.read())
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except PermissionError:
            above.append(Ancestor(pid, None))
            break
        except (OSError, ValueError, IndexError):
            break
        above.append(Ancestor(pid, variables))
        pid = parent
    return Ancestors(environ, above, at_start)


def set_together(ancestors: Ancestors | None, one: str, other: str) -> bool:
    """Whether the same process has set both variables; True if that is unknown."""
    return ancestors is None or ancestors.generation((one,)) == ancestors.generation((other,))


def openmp_of_outer(environ: Mapping[str, str], ancestors: Ancestors | None) -> dict[str, str]:
    """The OpenMP variables that an outer `anyaccel run` or `anyaccel bind` has set, not the user, and which of them.

    They are about the cores of that one's ranks. None are known where `ancestors` is None.
    """
    return {
        variable: setter
        for mark, setter in ((RUN, "anyaccel run"), (BOUND, "anyaccel bind"))
        if ancestors is not None and mark in environ
        for variable in _OPENMP
        if environ.get(variable) and set_together(ancestors, variable, mark)
    }


def without_outer_openmp(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of this process without those variables."""
    if not (RUN in environ or BOUND in environ):
        return environ
    gone = openmp_of_outer(environ, read_ancestors(environ))
    return {name: value for name, value in environ.items() if name not in gone}


def _parse(block: bytes) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in block.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}
