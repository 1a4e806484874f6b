# SPDX-License-Identifier: Apache-2.0
"""Chooses the memory policy of a rank (set_mempolicy(2)) and the NUMA nodes that it names."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.topology import Machine

# Modes of set_mempolicy(2) by the name that a plan shows.
MEMORY_MODES = {"default": 0, "preferred": 1, "bind": 2, "interleave": 3}
# Linux 5.15 and later; plain "preferred" takes one node only.
PREFERRED_MANY = 5


def memory_policy(machine: Machine, cores: Sequence[int], wanted: str = "auto") -> tuple[str, tuple[int, ...]]:
    """The policy for a rank on these cores: a key of MEMORY_MODES, and the nodes; ("default", ()) for none.

    Args:
        wanted: one of `options.MEMORY_POLICIES`:

            - auto: cores inside one node that has memory bind to that node (to all nodes that show the same cores,
              where the kernel was told to cut one node into several). Where HBM is a node of its own, the nearest
              one is preferred, so that what does not fit goes to the memory of the cores. Cores of several nodes,
              or of a node without memory, keep the kernel's default, which takes memory from the node that
              touches it, or the nearest one.
            - bind, preferred: only from, first from the nodes of the cores; from the nearest, where those have none.
            - interleave: page by page from every node that has cores.
            - none: the kernel's default.
    """
    if wanted == "auto":
        return _automatic(machine, cores)
    if wanted == "none":
        return ("default", ())
    nodes = _nodes_with_cores(machine) if wanted == "interleave" else _nodes_of(machine, cores)
    return (wanted, nodes) if nodes else ("default", ())


def _automatic(machine: Machine, cores: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    wanted = set(cores)
    around = [node for node in machine.nodes if wanted.issubset(node.cpus)]
    near = machine.memory_near(around[0].id, "hbm") if around else ()
    fast = [node for node in near if node.id in machine.allowed_memory_nodes]
    if fast:
        distance = fast[0].distances.get(around[0].id)
        nearest = [node.id for node in fast if node.distances.get(around[0].id) == distance]
        return ("preferred", tuple(sorted(nearest)))
    nodes = tuple(node.id for node in around if node.id in machine.allowed_memory_nodes)
    return ("bind", nodes) if nodes else ("default", ())


def _nodes_with_cores(machine: Machine) -> tuple[int, ...]:
    return tuple(node.id for node in machine.nodes if node.cpus and node.id in machine.allowed_memory_nodes)


def _nodes_of(machine: Machine, cores: Sequence[int]) -> tuple[int, ...]:
    found: set[int] = set()
    for node in machine.nodes:
        if not set(cores).intersection(node.cpus):
            continue
        if node.id in machine.allowed_memory_nodes:
            found.add(node.id)
            continue
        known = {other: node.distances[other] for other in machine.allowed_memory_nodes if other in node.distances}
        found.update(other for other, distance in known.items() if distance == min(known.values()))
    return tuple(sorted(found))
