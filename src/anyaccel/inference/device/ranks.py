# SPDX-License-Identifier: Apache-2.0
"""The ranks of tensor parallelism: what of a decoder is summed, joined or agreed between them.

They talk through a torch.distributed group of the accelerator's own backend; on a CPU sums go through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from anyaccel import comm
from anyaccel.accelerator import get_accelerator
from anyaccel.errors import CommError

_WORD = 1 << 64


class TensorRanks:
    """This rank among those that share each layer.

    Args:
        group: all of them, in their order.
        rows: of the vocabulary, how many each rank has.

    Attributes:
        capturable: whether the group's calls may be part of a graph of the accelerator.
    """

    def __init__(self, group: dist.ProcessGroup, rows: Sequence[int]) -> None:
        self.group = group
        self._rows = list(rows)
        accelerator = get_accelerator()
        self._device = accelerator.device(accelerator.current_device())
        backend = dist.get_backend(group)
        self.capturable = any(each.name == backend and each.in_graphs for each in accelerator.spec.collectives)
        self._between: Callable[[Callable[[], object]], None] | None = None

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in the place of this one; the same bits on all ranks."""
        part = part.contiguous()
        if self._between is None:
            comm.inference_all_reduce(part, group=self.group)
        else:
            self._between(lambda: comm.inference_all_reduce(part, group=self.group))
        return part

    @contextmanager
    def in_pieces(self, between: Callable[[Callable[[], object]], None]) -> Iterator[None]:
        """Within, `add` hands its call to `between` instead of making it: a capture that it must not be part of."""
        self._between = between
        try:
            yield
        finally:
            self._between = None

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] of the ranks' parts of it."""
        most = max(self._rows)
        own = part.contiguous() if part.shape[1] == most else torch.nn.functional.pad(part, (0, most - part.shape[1]))
        parts = [torch.empty_like(own) for _ in self._rows]
        with _as_comm_error("joining logits"):
            dist.all_gather(parts, own, group=self.group)
        return torch.cat([of_rank[:, :count] for of_rank, count in zip(parts, self._rows, strict=True)], 1)

    def first(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in the place of this rank's."""
        return comm.inference_broadcast(values, group=self.group)

    def shared(self, value: int) -> int:
        """Rank 0's number of 64 bits without a sign."""
        signed = value - _WORD if value >= _WORD // 2 else value
        return int(self.first(torch.tensor([signed], dtype=torch.int64, device=self._device))) % _WORD

    def least(self, value: int) -> int:
        """The smallest of the ranks' numbers; a collective call that waits for all of them."""
        smallest = torch.tensor([value], dtype=torch.int64, device=self._device)
        comm.inference_all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.group)
        return int(smallest)


@contextmanager
def _as_comm_error(what: str) -> Iterator[None]:
    """torch.distributed raises RuntimeError for whatever goes wrong on the way."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(f"{what}: {error}") from error
