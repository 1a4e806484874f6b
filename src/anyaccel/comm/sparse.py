# SPDX-License-Identifier: Apache-2.0
"""All-reduce of sparse tensors in torch's COO layout (coordinates and values)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ReduceOp

from anyaccel.comm.dtypes import AVG, SUM
from anyaccel.errors import UsageError

# A function that gathers: given a tensor to fill for each rank, and this rank's own tensor.
Gather = Callable[[list[torch.Tensor], torch.Tensor], None]

_MOST_DIMS = 62  # the number of sizes that fit in a header


def _header(tensor: torch.Tensor) -> torch.Tensor:
    """The header that ranks exchange: numbers of values and sparse dimensions, dtype, number of dimensions, sizes."""
    if tensor.dim() > _MOST_DIMS:
        raise UsageError(
            f"all_reduce of a sparse tensor of {tensor.dim()} dimensions; at most {_MOST_DIMS} are possible"
        )
    # The dtype's name as a number, which is the same in every version of torch.
    dtype = int.from_bytes(str(tensor.dtype).removeprefix("torch.").encode()[:7], "little")
    header = torch.zeros(4 + _MOST_DIMS, dtype=torch.int64, device="cpu")
    numbers = [tensor._nnz(), tensor.sparse_dim(), dtype, tensor.dim(), *tensor.shape]
    header[: len(numbers)] = torch.tensor(numbers, device="cpu")
    return header


def _shape(header: torch.Tensor) -> str:
    dims = int(header[3])
    return f"{header[4 : 4 + dims].tolist()} ({int(header[1])} sparse dimensions)"


def check(tensor: torch.Tensor, op: int) -> None:
    """Check that sparse tensors can be reduced by this operation; the result is the same on all ranks.

    Raises:
        UsageError: they cannot.
    """
    if op not in (SUM, AVG):
        raise UsageError(f"all_reduce of sparse tensors has SUM and AVG, not {ReduceOp.RedOpType(op).name}")
    if op == AVG and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        raise UsageError(f"there is no average of {str(tensor.dtype).removeprefix('torch.')}")


def all_reduce(tensor: torch.Tensor, op: int, size: int, gather: Gather) -> None:
    """Replace the tensor by the coalesced sum or average of all ranks' tensors.

    Every rank gathers all coordinates and values and adds them up in rank order, so all ranks have the same bits. Half
    types are added in fp32.

    Args:
        op: torch's number of the reduction.
        size: how many ranks there are.

    Raises:
        UsageError: another reduction, or the ranks' tensors differ in shape or dtype; all ranks are told.
    """
    check(tensor, op)
    with torch.no_grad():
        own = tensor.coalesce()
        header = _header(own)
        headers = [torch.empty_like(header) for _ in range(size)]
        gather(headers, header)
        for rank, other in enumerate(headers):
            if not torch.equal(other[1:], header[1:]):
                raise UsageError(
                    f"all_reduce of sparse tensors: this rank's is {_shape(header)}, {tensor.dtype}; rank {rank} of "
                    f"the group has {_shape(other)}" + ("" if other[2] == header[2] else ", another dtype")
                )
        counts = [int(other[0]) for other in headers]
        indices = own.indices().contiguous()
        values = own.values().contiguous()
        all_indices = [torch.empty(indices.shape[0], count, dtype=torch.int64, device="cpu") for count in counts]
        all_values = [torch.empty(count, *values.shape[1:], dtype=values.dtype, device="cpu") for count in counts]
        gather(all_indices, indices)
        gather(all_values, values)
        joined = torch.cat(all_values)
        half = joined.dtype in (torch.float16, torch.bfloat16)
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, 1),
            joined.float() if half else joined,
            tensor.shape,
            device="cpu",
            check_invariants=False,
        ).coalesce()
        if op == AVG:
            total = total / size
        tensor.copy_(total.to(tensor.dtype))
