# SPDX-License-Identifier: Apache-2.0
"""What ranks of one host check of each other's calls, and reductions at the edges of their types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm, errors

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)


def averages(group: Any) -> None:
    rank, world = group.rank(), group.size()
    for dtype in _INTEGERS:
        info = torch.iinfo(dtype)
        rows = [[info.max, info.min, info.max, 7 - r, info.max - r, 0] for r in range(world)]
        rows[0][2] = info.min
        rows = [[max(value, info.min) for value in row] for row in rows]
        wanted = [int(abs(total) // world) * (1 if total >= 0 else -1) for total in map(sum, zip(*rows, strict=True))]
        tensor = torch.tensor(rows[rank]).to(dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
        assert tensor.tolist() == wanted, dtype


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.real if tensor.dtype.is_complex else tensor.float()


def edges() -> None:
    group = comm.new_group(backend="shm")
    rank, world = group.rank(), group.size()
    averages(group)
    # Sizes that differ from rank to rank, of plain types, of those that are brought to others, and none at all.
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool):
        for counts in ([r + 1 for r in range(world)], [0, *[3] * (world - 1)]):
            inputs = [torch.full((count,), 1).to(dtype) for count in counts]
            output = torch.zeros(counts[rank]).to(dtype)
            dist.reduce_scatter(output, inputs, group=group)
            assert _real(output).tolist() == [1 if dtype == torch.bool else world] * counts[rank]
            assert all(bool((_real(tensor) == 1).all()) for tensor in inputs)
    with pytest.raises(errors.UsageError, match="5 elements with 2 in input"):
        dist.reduce_scatter(torch.empty(5), [torch.empty(2)] * world, group=group)
    with pytest.raises(errors.UsageError, match=r"\[-1\]"):
        comm.symm_empty((-1,), group=group)
    with torch.device("meta"):
        zeros = comm.symm_zeros((3,), group=group)
        nothing = comm.symm_zeros((0,), group=group)
    assert zeros.device.type == nothing.device.type == "cpu"
    assert zeros.tolist() == [0, 0, 0]


def test_edges() -> None:
    ranks.run(edges, 3)


def disagreements(one: torch.dtype, other: torch.dtype) -> list[str]:
    texts = []
    for operation in ("all_reduce", "reduce", "reduce_scatter"):
        group = comm.new_group(backend="shm")
        tensor = torch.ones(4).to(other if group.rank() else one)
        with pytest.raises(errors.CommError) as caught:
            if operation == "all_reduce":
                dist.all_reduce(tensor, group=group)
            elif operation == "reduce":
                dist.reduce(tensor, 0, group=group)
                dist.barrier(group)  # what is not the root may have left before it sees the difference
            else:
                dist.reduce_scatter(tensor[:2].clone(), list(tensor.split(2)), group=group)
        texts.append(f"{operation}: {caught.value}")
    return texts


@pytest.mark.parametrize(
    ("one", "other"),
    [(torch.float8_e4m3fn, torch.float32), (torch.uint16, torch.int16), (torch.bool, torch.uint8)],
    ids=str,
)
def test_the_dtypes_that_callers_have_are_compared(one: torch.dtype, other: torch.dtype) -> None:
    for texts in ranks.run(disagreements, 2, one, other):
        for text in texts:
            if "disagree" in text:
                assert str(one).removeprefix("torch.") in text
                assert str(other).removeprefix("torch.") in text
    told = [text for texts in ranks.run(disagreements, 2, one, other) for text in texts if "disagree" in text]
    assert {text.split(":")[0] for text in told} == {"all_reduce", "reduce", "reduce_scatter"}
