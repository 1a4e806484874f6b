# SPDX-License-Identifier: Apache-2.0
"""Work that is captured once and replayed: one graph, or several with calls between them that no graph may have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from anyaccel.accelerator import Capability, get_accelerator


class Interrupting(Protocol):
    """Ranks whose calls may not be captured: see `TensorRanks.in_pieces`."""

    capturable: bool

    def in_pieces(self, between: Callable[[Callable[[], object]], None]) -> contextlib.AbstractContextManager[None]: ...


class Captured:
    """The graphs of one piece of work, in their order.

    Args:
        pool: memory of other graphs that these share, as the graph of torch.cuda gives it; None for memory of its own.

    Attributes:
        pool: the memory that was used; None where the vendor's graphs tell nothing of theirs.
        result: what the work has given. A replay writes it again.
        bytes: how much more memory the device holds for it; 0 where the device does not tell.
    """

    def __init__(self, work: Callable[[], torch.Tensor], ranks: Interrupting | None, pool: Any = None) -> None:
        self.pool = pool
        self._graphs: list[Any] = []
        self._steps: list[Callable[[], object]] = []
        accelerator = get_accelerator()
        held = _held()
        with contextlib.ExitStack() as opened:
            if ranks is not None and not ranks.capturable:
                opened.enter_context(ranks.in_pieces(self._interrupt))
            self._piece = opened.enter_context(contextlib.ExitStack())
            self._begin()
            self.result = work()
        self._take_pool()
        accelerator.synchronize()
        self.bytes = max(_held() - held, 0)

    def _begin(self) -> None:
        accelerator = get_accelerator()
        graph = accelerator.create_graph()
        self._piece.enter_context(accelerator.capture_to_graph(graph, pool=self.pool))
        self._graphs.append(graph)
        self._steps.append(lambda: accelerator.replay_graph(graph))

    def _interrupt(self, call: Callable[[], object]) -> None:
        """End a piece, and begin the next one behind the call, which is made by replays only."""
        self._piece.close()
        self._take_pool()
        self._steps.append(call)
        self._begin()

    def _take_pool(self) -> None:
        if self.pool is None:
            pool = getattr(self._graphs[-1], "pool", None)  # not every vendor's graphs can share memory
            self.pool = None if pool is None else pool()

    def replay(self) -> None:
        for step in self._steps:
            step()

    def reset(self) -> None:
        """Give the memory back; it cannot be replayed any more."""
        self._steps.clear()
        for graph in self._graphs:
            reset = getattr(graph, "reset", None)  # not every vendor's graph can be emptied
            if reset is not None:
                reset()


def _held() -> int:
    """Bytes that the device holds for tensors and graphs."""
    accelerator = get_accelerator()
    if accelerator.has(Capability.RESERVED_MEMORY):
        return accelerator.memory_reserved()
    return 0
