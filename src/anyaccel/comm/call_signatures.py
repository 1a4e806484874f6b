# SPDX-License-Identifier: Apache-2.0
"""Checks, before an operation among several hosts, that all ranks have called the same one."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.comm.dtypes import CODES, OP_NAMES, SUM, dtype_code, op_code
from anyaccel.comm.operations import MismatchError

_OPERATIONS = (
    *("barrier", "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"),
    *("all_to_all", "gather", "scatter"),
)
LENGTH = 5
NONE = -1


def signature(operation: str, dtype: torch.dtype | None, count: int, op: Any, root: int | None) -> list[int]:
    """The signature of a call as numbers that ranks exchange: operation, dtype, elements, reduction, root."""
    code = NONE if dtype is None else dtype_code(dtype)
    return [
        _OPERATIONS.index(operation),
        code,
        count,
        NONE if op is None else op_code(op),
        NONE if root is None else root,
    ]


def check_equal(rank: int, signatures: list[list[int]]) -> None:
    """Check that all ranks have called the same operation, with the same arguments.

    Raises:
        Disagreement: they have not.
    """
    own = signatures[rank]
    for peer, theirs in enumerate(signatures):
        if theirs != own:
            raise MismatchError(
                f"ranks disagree: rank {rank} called {_describe(own)}, rank {peer} called {_describe(theirs)}"
            )


def _describe(signature: list[int]) -> str:
    """The call with this signature, for messages."""
    operation, code, count, op, root = signature
    text = _OPERATIONS[operation]
    if code != NONE:
        names = [str(dtype).removeprefix("torch.") for dtype, number in CODES.items() if number == code]
        text += f" of {count} {names[0] if names else 'elements'}"
    if op not in (NONE, SUM):
        text += f" with {OP_NAMES[op].lower()}"
    if root != NONE:
        text += f" {'from' if _OPERATIONS[operation] in ('broadcast', 'scatter') else 'to'} rank {root}"
    return text
