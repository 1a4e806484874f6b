# SPDX-License-Identifier: Apache-2.0
"""The blocking collectives that need no process group of ours, on the shared memory of any group's ranks."""

from __future__ import annotations

import functools

import torch

from anyaccel import _native
from anyaccel.comm import sparse
from anyaccel.comm.dtypes import SUM, Lowered, dtype_code, lower
from anyaccel.comm.tensors import InPlaceTarget, is_sparse


class Collectives:
    """The collectives of one rank's `native` group."""

    def __init__(self, native: _native.ShmGroup, rank: int, size: int) -> None:
        self.native = native
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor, op: int = SUM) -> None:
        """All-reduce in place."""
        if tensor.layout == torch.sparse_coo and is_sparse(tensor):
            sparse.all_reduce(tensor, op, self.size, self.all_gather)
            return
        target = InPlaceTarget(tensor)
        self.all_reduce_dense(target.memory, op)
        target.store()

    def all_reduce_dense(self, memory: torch.Tensor, op: int) -> None:
        """`all_reduce` of a plain tensor."""
        low = lower(memory, op)
        if low.op is None:
            memory.copy_(self.gather_and_reduce(low))
            return
        self.native.all_reduce(low.tensor.data_ptr(), low.tensor.numel(), low.code, low.op, low.original_code)
        if low.restore is not None:
            memory.copy_(low.restore(low.tensor))

    def gather_and_reduce(self, low: Lowered) -> torch.Tensor:
        """The result of a reduction without a native kernel: gather the tensors, and reduce them in rank order."""
        parts = [torch.empty_like(low.tensor) for _ in range(self.size)]
        self.all_gather(parts, low.tensor)
        assert low.combine is not None
        return functools.reduce(low.combine, parts)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcast in place from `root`."""
        target = InPlaceTarget(tensor)
        memory = target.memory
        self.native.broadcast(memory.data_ptr(), memory.numel(), dtype_code(memory.dtype), root)
        target.store()

    def all_gather(self, outputs: list[torch.Tensor], source: torch.Tensor) -> None:
        """Gather plain tensors: outputs[r] gets that of rank r; sizes may differ from rank to rank."""
        counts = [output.numel() for output in outputs]
        addresses = [output.data_ptr() for output in outputs]
        self.native.all_gather(source.data_ptr(), addresses, counts, dtype_code(source.dtype))
