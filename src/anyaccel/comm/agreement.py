# SPDX-License-Identifier: Apache-2.0
"""What ranks of several hosts tell each other before an operation: numbers that are to be the same on all."""

from __future__ import annotations

from typing import Any

import torch

from anyaccel.comm.dtypes import CODES, OP_NAMES, SUM, code_of, op_code
from anyaccel.comm.python_operations import Disagreement

_OPERATIONS = (
    *("barrier", "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"),
    *("all_to_all", "gather", "scatter"),
)
LENGTH = 5
NONE = -1


def form(operation: str, dtype: torch.dtype | None, count: int, op: Any, root: int | None) -> list[int]:
    """A call as numbers that ranks exchange: operation, dtype, elements, reduction, root."""
    code = NONE if dtype is None else code_of(dtype)
    return [
        _OPERATIONS.index(operation),
        code,
        count,
        NONE if op is None else op_code(op),
        NONE if root is None else root,
    ]


def compare(rank: int, forms: list[list[int]]) -> None:
    """Check that all ranks have called the same operation, with the same arguments.

    Raises:
        Disagreement: they have not.
    """
    own = forms[rank]
    for peer, theirs in enumerate(forms):
        if theirs != own:
            raise Disagreement(
                f"ranks disagree: rank {rank} called {_described(own)}, rank {peer} called {_described(theirs)}"
            )


def _described(form: list[int]) -> str:
    """For messages: the call that `form` made these numbers of."""
    operation, code, count, op, root = form
    text = _OPERATIONS[operation]
    if code != NONE:
        names = [str(dtype).removeprefix("torch.") for dtype, number in CODES.items() if number == code]
        text += f" of {count} {names[0] if names else 'elements'}"
    if op not in (NONE, SUM):
        text += f" with {OP_NAMES[op].lower()}"
    if root != NONE:
        text += f" {'from' if _OPERATIONS[operation] in ('broadcast', 'scatter') else 'to'} rank {root}"
    return text
