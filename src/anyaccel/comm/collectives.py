# SPDX-License-Identifier: Apache-2.0
"""Blocking collectives on a native group, for tensors of any layout and dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from anyaccel import _native
from anyaccel.comm import sparse
from anyaccel.comm.dtypes import SUM, Lowered, code_of, lower
from anyaccel.comm.tensors import Target, bare, is_plain, is_sparse, same_dtype, values
from anyaccel.errors import UsageError


def _addresses(memory: torch.Tensor, counts: Sequence[int]) -> list[int]:
    """The addresses of consecutive pieces of a tensor, given the number of elements of each."""
    addresses, at = [], memory.data_ptr()
    for count in counts:
        addresses.append(at)
        at += count * memory.element_size()
    return addresses


class Collectives:
    """The collectives of one rank's `native` group."""

    def __init__(self, native: _native.ShmGroup, rank: int, size: int) -> None:
        self.native = native
        self.rank = rank
        self.size = size

    # --- reductions

    def all_reduce(self, tensor: torch.Tensor, op: int = SUM) -> None:
        """All-reduce in place."""
        if tensor.layout == torch.sparse_coo and is_sparse(tensor):
            sparse.all_reduce(tensor, op, self.size, self.all_gather)
            return
        self.all_reduce_bare(bare(tensor), op)

    def all_reduce_bare(self, own: torch.Tensor, op: int) -> None:
        """`all_reduce` of a tensor that `tensors.bare` has returned, without checking it again."""
        memory = own if is_plain(own) else values(own)
        low = lower(memory, op)
        if low.op is None:
            own.copy_(self._gather_and_reduce(low))
            return
        self.native.all_reduce(low.tensor.data_ptr(), low.tensor.numel(), low.code, low.op, low.original_code)
        if low.restore is not None:
            own.copy_(low.restore(low.tensor))
        elif memory is not own:
            own.copy_(memory)

    def _gather_and_reduce(self, low: Lowered) -> torch.Tensor:
        """The result of a reduction without a native kernel: gather the tensors, and reduce them in rank order."""
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
            result = self._gather_and_reduce(low)
        else:
            address = low.tensor.data_ptr()
            self.native.reduce(address, address, low.tensor.numel(), low.code, low.op, root, low.original_code)
            result = low.tensor if low.restore is None else low.restore(low.tensor)
        if self.rank != root:
            return
        if low.op is None or low.restore is not None:
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
            result = self._gather_and_reduce(Lowered(everything, first.code, None, combine=first.combine))[self.rank]
            output.copy_(result.view(output.shape))
            return
        into = target.memory if first.restore is None else torch.empty_like(first.tensor)
        self.native.reduce_scatter(
            [low.tensor.data_ptr() for low in lows],
            into.data_ptr(),
            first.tensor.numel(),
            first.code,
            first.op,
            first.original_code,
        )
        if first.restore is not None:
            output.copy_(first.restore(into).view(output.shape))
        else:
            target.store()

    def _reduce_scatter_uneven(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: int) -> None:
        """A reduce-scatter of pieces of different sizes, as one reduction for each rank that receives a piece."""
        for root, tensor in enumerate(inputs):
            given = bare(tensor).clone(memory_format=torch.contiguous_format)  # an input must not change
            self.reduce(given, op, root)
            if root == self.rank:
                bare(output).copy_(given.view(output.shape))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, op: int) -> None:
        """A reduce_scatter of inputs that are one after the other in one tensor."""
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
        """Broadcast in place from `root`."""
        own = bare(tensor)
        memory = values(own) if self.rank == root else Target(own).memory
        self.native.broadcast(memory.data_ptr(), memory.numel(), code_of(memory.dtype), root)
        if self.rank != root and memory.data_ptr() != own.data_ptr():
            own.copy_(memory)

    def all_gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor) -> None:
        """All-gather: outputs[r] gets the tensor of rank r; sizes may differ from rank to rank."""
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
        """An all_gather into one tensor, in rank order."""
        same_dtype([output, source], "all_gather")
        count = source.numel()
        if output.numel() != self.size * count:
            raise UsageError(
                f"all_gather of {count} elements a rank into {output.numel()}: must be {self.size} times as many"
            )
        target = Target(output)
        memory = values(source)
        counts = [count] * self.size
        self.native.all_gather(memory.data_ptr(), _addresses(target.memory, counts), counts, code_of(source.dtype))
        target.store()

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int) -> None:
        """Gather to `root`: outputs[r] gets the tensor of rank r. `outputs` is not used elsewhere."""
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
        """Scatter from `root`: `output` of rank r gets inputs[r]. `inputs` is not used elsewhere."""
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
        """All-to-all: outputs[r] gets inputs[this rank] of rank r."""
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
        """An all_to_all of slices along the first dimension; without splits they are equal."""
        same_dtype([output, source], "all_to_all")
        in_counts = self._split(source, input_splits, "input")
        out_counts = self._split(output, output_splits, "output")
        target = Target(output)
        memory = values(source)
        self.native.all_to_all(
            _addresses(memory, in_counts),
            in_counts,
            _addresses(target.memory, out_counts),
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
