# SPDX-License-Identifier: Apache-2.0
"""Every collective x type x operation x layout x group on each backend: the table is tests/helpers/collective_cases.py.

A job of a number of ranks runs all its cases at once, since a job takes seconds to start; each collective is a test
of its own that looks the results up and names the cases that failed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ranks
from anyaccel.comm import ccl
from collective_cases import CASES, MAIN_TYPES, Case, oneccl_folder, run_cases

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
    if case.collective in ("tags", "recv_from_any"):
        return "oneCCL's messages have no tags, and a receiver names the sender"
    return ""


UNSUPPORTED = {"gloo": unsupported_by_gloo, "ccl": unsupported_by_ccl, "shm": lambda case: ""}
COLLECTIVES = tuple(dict.fromkeys(case.collective for case in CASES.values()))


def is_quick(backend: str, world_size: int, case: Case) -> bool:
    """Whether a case is for every run of the tests: all on two ranks of shm, the main types elsewhere."""
    if world_size > 4 or (backend != "shm" and world_size != 2):
        return False
    if backend == "shm" and world_size == 2:
        return True
    return case.dtype is None or (case.dtype in MAIN_TYPES[:2] and case.operation in ("", "SUM", "MAX"))


@functools.cache
def results(backend: str, world_size: int, quick: bool) -> dict[str, str]:
    """Case -> what went wrong, of a job that is run once: the quick cases, or the others."""
    if backend == "ccl" and (why := ccl.why_not()):
        pytest.skip(f"{why}; or run tools/install_test_tools.sh")
    names = [
        name
        for name, case in CASES.items()
        if not UNSUPPORTED[backend](case) and is_quick(backend, world_size, case) == quick
    ]
    per_rank = ranks.run(run_cases, world_size, backend, names, backend == "shm", timeout=400)
    found: dict[str, str] = per_rank[0]
    return found


def parameters() -> Iterator[Any]:
    for backend in UNSUPPORTED:
        for world_size in (1, 2, 3, 4, 8):
            for quick in (True, False):
                for collective in (*COLLECTIVES, "subgroups"):
                    if cases(backend, world_size, quick, collective):
                        name = f"{backend}-{world_size}-{collective}-{'quick' if quick else 'rest'}"
                        marks = [] if quick else [pytest.mark.slow]
                        yield pytest.param(backend, world_size, quick, collective, marks=marks, id=name)


def cases(backend: str, world_size: int, quick: bool, collective: str) -> list[str]:
    """The cases of one test."""
    return [
        name
        for name, case in CASES.items()
        if (case.collective == collective or (collective == "subgroups" and world_size > 1))
        and not UNSUPPORTED[backend](case)
        and is_quick(backend, world_size, case) == quick
    ]


@pytest.fixture(autouse=True)
def _oneccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneCCL of tools/install_test_tools.sh, which is not among the packages."""
    if folder := oneccl_folder():
        monkeypatch.setenv("CCL_ROOT", str(folder))


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("backend", "world_size", "quick", "collective"), list(parameters()))
def test_collective(backend: str, world_size: int, quick: bool, collective: str) -> None:
    found = results(backend, world_size, quick)
    if collective == "subgroups":
        wrong = {name: text for name, text in found.items() if "@" in name and text}
    else:
        names = cases(backend, world_size, quick, collective)
        wrong = {name: found[name] for name in names if found[name]}
    assert not wrong


@pytest.mark.parametrize("backend", UNSUPPORTED)
def test_little_is_left_out(backend: str) -> None:
    share = sum(bool(UNSUPPORTED[backend](case)) for case in CASES.values()) / len(CASES)
    assert share <= {"shm": 0, "ccl": 0.25, "gloo": 0.6}[backend], "a backend that runs hardly anything is not tested"
