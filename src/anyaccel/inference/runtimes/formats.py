# SPDX-License-Identifier: Apache-2.0
"""Which packed format each matrix gets: by the dtype that was asked for, what is stored, and what accuracy needs.

- Embedding and head stay at 8 bits in int4: they are where four bits cost most.
- Groups of four bits have a minimum unless told otherwise: on SmolLM2-135M, groups of 32, perplexity is 0.6 % above
  bfloat16's with a minimum (5 bits a weight) and 29 % without (4.5 bits).
- A router chooses experts by small differences: it stays in float32.
- What is stored in a quantised form of the precision asked for, or when none is asked for, is kept as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.inference.runtimes.spec import MatrixShape

DTYPES = ("fp32", "bf16", "fp16", "int8", "int4")
GROUPS = (32, 64, 128)
DEFAULT_GROUP = 32

Format = tuple[str, int, bool]  # of `_llm`: format, group, minimum

_FLOATS: dict[str, Format] = {"fp32": ("f32", 0, False), "bf16": ("bf16", 0, False), "fp16": ("f16", 0, False)}
_EIGHT: Format = ("i8", 0, False)
_STORED: dict[str, Format] = {
    "f64": ("f32", 0, False),
    "f32": ("f32", 0, False),
    "f16": ("f16", 0, False),
    "bf16": ("bf16", 0, False),
    "q8_0": ("i8", 32, False),
    "q4_0": ("i4", 32, False),
    "q4_1": ("i4", 32, True),
}


@dataclass(frozen=True)
class Precision:
    """What was asked for.

    Attributes:
        dtype: one of DTYPES; None: what the file has.
        group: columns that share a scale in int4.
        asymmetric: int4 values have a minimum each group.
    """

    dtype: str | None
    group: int = DEFAULT_GROUP
    asymmetric: bool = True

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        if self.group not in GROUPS:
            raise UsageError(f"group={self.group}: must be one of {', '.join(map(str, GROUPS))}")


def stored_format(tensor: Any, cols: range) -> Format:
    """The native format that is closest to these columns of a stored matrix."""
    from anyaccel.inference.runtimes.sources import TensorView

    if isinstance(tensor, TensorView):
        return _STORED[tensor.type]
    return tensor.format(cols) or tensor.fallback  # type: ignore[no-any-return]


def _merged(stored: Sequence[Format]) -> Format:
    """One format for parts of several."""
    kinds = set(stored)
    if len(kinds) == 1:
        return stored[0]
    names = {kind for kind, _, _ in kinds}
    if names == {"i4"}:
        return ("i4", min(group for _, group, _ in kinds), any(minimum for _, _, minimum in kinds))
    if names <= {"i4", "i8"}:
        return ("i8", 32, False)
    floats = names - {"i4", "i8"}
    return (floats.pop() if len(floats) == 1 else "f32", 0, False)


def choose(shape: MatrixShape, wanted: Precision, stored: Sequence[Format]) -> MatrixShape:
    """`shape` with its format; `stored` are those of its parts."""
    name = shape.name.rsplit(".", 1)[-1]
    if name in ("router", "shared_gate"):
        return replace(shape, format="f32")
    chosen = _chosen(name, wanted, stored)
    kind, group, minimum = chosen
    if name == "positions" and kind in ("i8", "i4"):
        kind, group, minimum = "bf16", 0, False
    return replace(shape, format=kind, group=group, minimum=minimum)


def _chosen(name: str, wanted: Precision, stored: Sequence[Format]) -> Format:
    kinds = {kind for kind, _, _ in stored}
    if wanted.dtype is None or (wanted.dtype, kinds) in (("int4", {"i4"}), ("int8", {"i8"})):
        return _merged(stored)
    if wanted.dtype in _FLOATS:
        return _FLOATS[wanted.dtype]
    if wanted.dtype == "int8" or name in ("embed", "head"):
        return _EIGHT
    return ("i4", wanted.group, wanted.asymmetric)
