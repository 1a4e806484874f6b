# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensors on a native group: any layout, any dtype. They return when they are done."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from anyaccel import _native
from anyaccel.comm import sparse
from anyaccel.comm.dtypes import SUM, Lowered, code_of, lower
from anyaccel.comm.tensors import Target, bare, is_plain, is_sparse, same_dtype, values
from anyaccel.errors import UsageError


def _pieces(memory: torch.Tensor, counts: Sequence[int]) -> list[int]:
    """The addresses of consecutive pieces of a tensor, given the number of elements of each."""
    addresses, at = [], memory.data_ptr()
    for count in counts:
        addresses.append(at)
        at += count * memory.element_size()
    return addresses


class Collectives:
    """What a rank can do with its peers through `native`."""

    def __init__(self, native: _native.ShmGroup, rank: int, size: int) -> None:
        self.native = native
        self.rank = rank
        self.size = size

    # --- reductions

    def all_reduce(self, tensor: torch.Tensor, op: int = SUM) -> None:
        """In place."""
        if tensor.layout == torch.sparse_coo and is_sparse(tensor):
            sparse.all_reduce(tensor, op, self.size, self.all_gather)
            return
        self.all_reduce_bare(bare(tensor), op)

    def all_reduce_bare(self, own: torch.Tensor, op: int) -> None:
        """`all_reduce` of a tensor that `tensors.bare` has given, which is not looked through again."""
        memory = own if is_plain(own) else values(own)
        low = lower(memory, op)
        if low.op is None:
            own.copy_(self._combined(low))
            return
        self.native.all_reduce(low.tensor.data_ptr(), low.tensor.numel(), low.code, low.op, low.told)
        if low.raised is not None:
            own.copy_(low.raised(low.tensor))
        elif memory is not own:
            own.copy_(memory)

    def _combined(self, low: Lowered) -> torch.Tensor:
        """A reduction without a native kernel: all ranks' tensors are gathered, and reduced in rank order by torch."""
        parts = [torch.empty_like(low.tensor) for _ in range(self.size)]
        self.all_gather(parts, low.tensor)
        assert low.combine is not None
        return functools.reduce(low.combine, parts)

    def reduce(self, tensor: torch.Tensor, op: int, root: int) -> None:
        """Like all_reduce, but only `root` gets the result; the others' tensors stay as they are."""
        own = bare(tensor)
        memory = own if is_plain(own) else values(own)
        low = lower(memory, op)
        if low.op is None:
            result = self._combined(low)
        else:
            address = low.tensor.data_ptr()
            self.native.reduce(address, address, low.tensor.numel(), low.code, low.op, root, low.told)
            result = low.tensor if low.raised is None else low.raised(low.tensor)
        if self.rank != root:
            return
        if low.op is None or low.raised is not None:
            own.copy_(result)
        elif memory is not own:
            own.copy_(memory)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """`output` gets the reduction of what all ranks gave as inputs[this rank]; sizes may differ by rank."""
        if len(inputs) != self.size:
            raise UsageError(f"reduce_scatter needs one tensor a rank: {self.size}; got {len(inputs)}")
        same_dtype([output, *inputs], "reduce_scatter")
        if inputs[self.rank].numel() != output.numel():
            raise UsageError(
                f"reduce_scatter to {output.numel()} elements with {inputs[self.rank].numel()} in input {self.rank}"
            )
        if any(t.numel() != output.numel() for t in inputs):
            self._reduce_scatter_uneven(output, inputs, op)
            return
        target = Target(output)
        output = bare(output)
        lows = [lower(values(t), op) for t in inputs]
        first = lows[0]
        if first.op is None:
            everything = torch.stack([low.tensor.reshape(-1) for low in lows])
            result = self._combined(Lowered(everything, first.code, None, combine=first.combine))[self.rank]
            output.copy_(result.view(output.shape))
            return
        into = target.memory if first.raised is None else torch.empty_like(first.tensor)
        self.native.reduce_scatter(
            [low.tensor.data_ptr() for low in lows],
            into.data_ptr(),
            first.tensor.numel(),
            first.code,
            first.op,
            first.told,
        )
        if first.raised is not None:
            output.copy_(first.raised(into).view(output.shape))
        else:
            target.store()

    def _reduce_scatter_uneven(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """A reduce-scatter of pieces of different sizes, as one reduction for each rank that receives a piece."""
        for root, tensor in enumerate(inputs):
            given = bare(tensor).clone(memory_format=torch.contiguous_format)  # stays as it is
            self.reduce(given, op, root)
            if root == self.rank:
                bare(output).copy_(given.view(output.shape))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, op: int) -> None:
        """As reduce_scatter, with the inputs one after the other in one tensor."""
        if source.numel() != self.size * output.numel():
            raise UsageError(
                f"reduce_scatter of {source.numel()} elements to {output.numel()} a rank: must be {self.size} times "
                "as many"
            )
        flat = values(source).view(-1)
        step = output.numel()
        self.reduce_scatter(output, [flat[r * step : (r + 1) * step] for r in range(self.size)], op)

    # --- moving data

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """In place, from `root`."""
        own = bare(tensor)
        memory = values(own) if self.rank == root else Target(own).memory
        self.native.broadcast(memory.data_ptr(), memory.numel(), code_of(memory.dtype), root)
        if self.rank != root and memory.data_ptr() != own.data_ptr():
            own.copy_(memory)

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """outputs[r] gets what rank r gave; sizes may differ from rank to rank."""
        if len(outputs) != self.size:
            raise UsageError(f"all_gather needs one output a rank: {self.size}; got {len(outputs)}")
        same_dtype([source, *outputs], "all_gather")
        counts = [t.numel() for t in outputs]
        if counts[self.rank] != source.numel():
            raise UsageError(
                f"all_gather of {source.numel()} elements with room for {counts[self.rank]} in output {self.rank}"
            )
        targets = [Target(t) for t in outputs]
        memory = values(source)
        self.native.all_gather(memory.data_ptr(), [t.memory.data_ptr() for t in targets], counts, code_of(source.dtype))
        for target in targets:
            target.store()

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """The ranks' tensors one after the other."""
        same_dtype([output, source], "all_gather")
        count = source.numel()
        if output.numel() != self.size * count:
            raise UsageError(
                f"all_gather of {count} elements a rank into {output.numel()}: must be {self.size} times as many"
            )
        target = Target(output)
        memory = values(source)
        counts = [count] * self.size
        self.native.all_gather(memory.data_ptr(), _pieces(target.memory, counts), counts, code_of(source.dtype))
        target.store()

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> None:
        """`outputs`, on `root` only: outputs[r] gets what rank r gave."""
        targets = []
        if self.rank == root:
            if len(outputs) != self.size:
                raise UsageError(f"gather needs one output a rank: {self.size}; got {len(outputs)}")
            same_dtype([source, *outputs], "gather")
            if any(t.numel() != source.numel() for t in outputs):
                raise UsageError(f"gather of {source.numel()} elements a rank into {[t.numel() for t in outputs]}")
            targets = [Target(t) for t in outputs]
        memory = values(source)
        self.native.gather(
            memory.data_ptr(), [t.memory.data_ptr() for t in targets], memory.numel(), code_of(source.dtype), root
        )
        for target in targets:
            target.store()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        """`inputs`, on `root` only: `output` of rank r gets inputs[r]."""
        memories = []
        if self.rank == root:
            if len(inputs) != self.size:
                raise UsageError(f"scatter needs one tensor a rank: {self.size}; got {len(inputs)}")
            same_dtype([output, *inputs], "scatter")
            if any(t.numel() != output.numel() for t in inputs):
                raise UsageError(f"scatter of {[t.numel() for t in inputs]} elements to {output.numel()} a rank")
            memories = [values(t) for t in inputs]
        target = Target(output)
        self.native.scatter(
            [t.data_ptr() for t in memories], target.memory.data_ptr(), output.numel(), code_of(output.dtype), root
        )
        target.store()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """outputs[r] gets what rank r gave as its inputs[this rank]."""
        if len(outputs) != self.size or len(inputs) != self.size:
            raise UsageError(
                f"all_to_all needs one tensor a rank: {self.size}; got {len(inputs)} inputs and {len(outputs)} outputs"
            )
        same_dtype([*outputs, *inputs], "all_to_all")
        targets = [Target(t) for t in outputs]
        memories = [values(t) for t in inputs]
        self.native.all_to_all(
            [t.data_ptr() for t in memories],
            [t.numel() for t in memories],
            [t.memory.data_ptr() for t in targets],
            [t.numel() for t in outputs],
            code_of(outputs[0].dtype),
        )
        for target in targets:
            target.store()

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        """As all_to_all with slices along the first dimension; no splits: equal slices."""
        same_dtype([output, source], "all_to_all")
        in_counts = self._split(source, input_splits, "input")
        out_counts = self._split(output, output_splits, "output")
        target = Target(output)
        memory = values(source)
        self.native.all_to_all(
            _pieces(memory, in_counts),
            in_counts,
            _pieces(target.memory, out_counts),
            out_counts,
            code_of(source.dtype),
        )
        target.store()

    def _split(self, tensor: torch.Tensor, splits: Sequence[int], which: str) -> list[int]:
        """The number of elements of each slice."""
        rows = tensor.shape[0] if tensor.dim() else 1
        row = tensor[0].numel() if rows and tensor.dim() else torch.Size(tensor.shape[1:]).numel()
        if not splits:
            if rows % self.size:
                raise UsageError(f"all_to_all: {rows} rows of the {which} cannot be split evenly for {self.size} ranks")
            return [rows // self.size * row] * self.size
        if len(splits) != self.size or sum(splits) != rows or min(splits) < 0:
            raise UsageError(f"all_to_all: {which} splits {list(splits)} for {self.size} ranks and {rows} rows")
        return [count * row for count in splits]
