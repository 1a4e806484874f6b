# SPDX-License-Identifier: Apache-2.0
"""Every collective x type x operation x layout x group on each backend: the table is tests/collective_cases.py.

A job of a number of ranks runs all its cases at once, since a job takes seconds to start; each case is a test of its
own that looks its result up.
"""

from __future__ import annotations

import functools

import pytest
import torch

import ranks
from collective_cases import CASES, Case, run_cases

GLOO_TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
GLOO_LACKS = ("all_gather_uneven", "all_gather_stacked", "all_to_all_uneven", "coalescing_manager")


def unsupported_by_gloo(case: Case) -> str:
    """Why torch's gloo cannot run a case."""
    if case.dtype and case.dtype not in GLOO_TYPES:
        return f"gloo does not take {case.dtype}"
    if case.operation == "AVG":
        return "gloo has no AVG"
    if case.collective in GLOO_LACKS:
        return f"gloo has no {case.collective}"
    return ""


def unsupported_by_ccl(case: Case) -> str:
    """Why oneCCL cannot run a case."""
    if case.operation in ("BAND", "BOR", "BXOR"):
        return f"oneCCL has no {case.operation}"
    if case.operation == "PRODUCT" and case.dtype is not None and case.dtype.is_complex:
        return "oneCCL has no complex numbers; parts are added, but cannot be multiplied"
    if case.collective in ("tags", "recv_from_any"):
        return "oneCCL's messages have no tags, and a receiver names the sender"
    return ""


UNSUPPORTED = {"gloo": unsupported_by_gloo, "ccl": unsupported_by_ccl, "shm": lambda case: ""}
WORLD_SIZES = (1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow))


@functools.cache
def results(backend: str, world_size: int) -> dict[str, str]:
    """Case -> what went wrong, of a job that is run once."""
    names = [name for name, case in CASES.items() if not UNSUPPORTED[backend](case)]
    per_rank = ranks.run(run_cases, world_size, backend, names, backend == "shm", timeout=300)
    found: dict[str, str] = per_rank[0]
    return found


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("backend", UNSUPPORTED)
def test_collective(backend: str, world_size: int, name: str) -> None:
    if reason := UNSUPPORTED[backend](CASES[name]):
        pytest.skip(reason)
    assert not results(backend, world_size)[name]


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world_size", [size for size in WORLD_SIZES if size != 1])
@pytest.mark.parametrize("backend", UNSUPPORTED)
def test_collectives_of_subgroups(backend: str, world_size: int) -> None:
    wrong = {name: text for name, text in results(backend, world_size).items() if "@" in name and text}
    assert not wrong
