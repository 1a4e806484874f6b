# SPDX-License-Identifier: Apache-2.0
"""Binds this process as its plan says, and reports each system call that the kernel refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from anyaccel import _native
from anyaccel.launch.plan.memory import MEMORY_MODES, PREFERRED_MANY
from anyaccel.launch.plan.plan import RankBinding
from anyaccel.topology import format_cpu_list

# Exit code of a process that could not be bound and has to be: EX_OSERR of sysexits.h.
EXIT_NOT_BOUND = 71

_NOT = {"bind": "bound to", "preferred": "taken first from", "interleave": "interleaved over"}


def bind_this_process(binding: RankBinding) -> list[str]:
    """Put this process, and what it will start, on the cores and memory of a rank.

    Returns:
        What the kernel refused, one line each; with strict options the caller ends then.
    """
    cores = format_cpu_list(binding.cores)
    bound = "its cores are not bound"
    if binding.cores:
        try:
            os.sched_setaffinity(0, binding.cores)
        except OSError as error:
            # Without bound cores, memory bound to one node would be slower than the kernel's default policy.
            return [f"rank {binding.rank} is not bound to cores {cores}: {error.strerror}; it runs unbound"]
        bound = f"its cores are bound to {cores}"
    if not binding.memory_nodes:
        return []
    try:
        _set_memory(binding.memory_policy, binding.memory_nodes)
    except OSError as error:
        nodes = format_cpu_list(binding.memory_nodes)
        return [
            f"memory of rank {binding.rank} is not {_NOT[binding.memory_policy]} node {nodes}: "
            f"{os.strerror(error.errno or 0)} (usual in containers); {bound}"
        ]
    return []


def bind_worker(binding: RankBinding, say: Callable[[str], None]) -> None:
    """Bind a worker before it executes its program; with strict options a failure ends the process."""
    problems = bind_this_process(binding)
    for problem in problems:
        say(f"{'error' if binding.strict else 'warning'}: {problem}")
    if problems and binding.strict:
        os._exit(EXIT_NOT_BOUND)


def _set_memory(policy: str, nodes: tuple[int, ...]) -> None:
    if policy != "preferred" or len(nodes) == 1:
        _native.set_mempolicy(MEMORY_MODES[policy], nodes)
        return
    try:
        _native.set_mempolicy(PREFERRED_MANY, nodes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 5.15 knows only one preferred node.
        _native.set_mempolicy(MEMORY_MODES[policy], nodes[:1])
