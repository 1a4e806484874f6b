# SPDX-License-Identifier: Apache-2.0
"""Which packed format each matrix gets: by the dtype that was asked for, what is stored, and what accuracy needs.

- Embedding and head stay at 8 bits in int4: they are where four bits cost most.
- Groups of four bits have a minimum unless told otherwise: on SmolLM2-135M, groups of 32, perplexity is 0.6 % above
  bfloat16's with a minimum (5 bits a weight) and 29 % without (4.5 bits).
- A router chooses experts by small differences, and small ones of steps add up in a state: they stay in float32.
- What is stored in a quantised form of the precision asked for, or when none is asked for, is kept as it is: in the
  smallest native format that holds its values. A matrix of parts of several types has the format that holds them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.inference.options import GROUP_SIZES, ModelOptions
from anyaccel.inference.spec.decoder import MatrixShape
from anyaccel.inference.spec.packed_formats import FORMATS, QUANTISED, Format

_FLOATS: dict[str, Format] = {"fp32": ("f32", 0, False), "bf16": ("bf16", 0, False), "fp16": ("f16", 0, False)}
# Matrices of a few rows, of which much depends: small differences choose experts and tokens, or forget states.
ALWAYS_FLOAT = ("router", "shared_gate", "steps", "index_weights")
# Small matrices that cost much when they are rounded: those of Mamba's steps, as in llama.cpp, and of decays.
AT_LEAST_16_BITS = ("positions", "distances", "select", "step_up", "gates")
_EIGHT: Format = ("i8", 0, False)
# Those that are smaller than what --dtype int8 would make of them, or as large, and exact.
_KEPT_AS_8_BITS = QUANTISED - {"i4"}
_KEPT_AS_4_BITS = {name for name in QUANTISED if FORMATS[name].bits <= 4}
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
        dtype: fp32, bf16, fp16, int8 or int4; None: what the file has.
        group: columns that share a scale in int4.
        asymmetric: int4 values have a minimum each group.
    """

    dtype: str | None
    group: int = 32
    asymmetric: bool = True

    def __post_init__(self) -> None:
        if self.group not in GROUP_SIZES:
            raise UsageError(f"group={self.group}: must be one of {', '.join(map(str, GROUP_SIZES))}")

    @classmethod
    def from_options(cls, options: ModelOptions) -> Precision:
        """The precision that the options of a model ask for."""
        return cls(None if options.dtype == "auto" else options.dtype, options.group_size)


def stored_format(tensor: Any, cols: range) -> Format:
    """The smallest native format that holds these columns of a stored matrix."""
    from anyaccel.inference.checkpoints.sources import TensorView

    if isinstance(tensor, TensorView):
        return _STORED[tensor.type]
    return tensor.format(cols)  # type: ignore[no-any-return]


def _merged(stored: Sequence[Format]) -> Format:
    """The smallest format that holds parts of several: smaller groups, a minimum, and more bits lose nothing."""
    kinds = set(stored)
    if len(kinds) == 1:
        return stored[0]
    floats = {kind for kind, _, _ in kinds} - QUANTISED
    if floats:
        return (floats.pop() if len(floats) == 1 else "f32", 0, False)
    minimum = any(each for _, _, each in kinds)
    for kind in sorted(QUANTISED, key=lambda name: FORMATS[name].bits):
        for group in sorted(FORMATS[kind].groups, reverse=True):
            wider = (kind, group, minimum or FORMATS[kind].minima == "always")
            if group and all(_within(own, wider) for own in kinds):
                return wider
    raise AssertionError(f"no format holds {kinds}")  # int8 in groups of 16 with minima does


def holds(shape: MatrixShape, own: Format) -> bool:
    """Whether what is in the quantised format `own` can be kept in that of `shape`: no value is rounded again."""
    return _within(own, (shape.format, shape.group, shape.minimum))


def _within(own: Format, wider: Format) -> bool:
    kind, group, minimum = own
    name, parts, minima = wider
    if kind not in QUANTISED or name not in QUANTISED:
        return False
    to = FORMATS[name]
    if (minimum and not minima) or (minima and to.minima == "never"):
        return False
    if kind != name and (parts == 0 or to.codes is not None or FORMATS[kind].bits > to.bits):
        return False
    if kind != name and FORMATS[kind].codes is not None and to.bits < 8:
        return False
    if group == 0:
        return True  # one scale a row: any groups
    return parts > 0 and group % parts == 0


def forms(stored: Iterable[tuple[str, MatrixShape]]) -> dict[str, list[str]]:
    """What types run as, in words, most of their values first.

    Args:
        stored: a type and a matrix that has values of it.
    """
    counts: dict[str, Counter[str]] = {}
    for kind, shape in stored:
        form = _words((shape.format, shape.group, shape.minimum))
        counts.setdefault(kind, Counter())[form] += shape.rows * shape.cols
    return {kind: [form for form, _ in found.most_common()] for kind, found in counts.items()}


def _words(form: Format) -> str:
    kind, group, minimum = form
    if group == 0:
        return FORMATS[kind].words + (" with a scale a row" if kind == "i8" else "")
    return f"{FORMATS[kind].words} in groups of {group}{' with a minimum' if minimum else ''}"


def choose(shape: MatrixShape, wanted: Precision, stored: Sequence[Format]) -> MatrixShape:
    """`shape` with its format; `stored` are those of its parts."""
    name = shape.name.rsplit(".", 1)[-1]
    if name in ALWAYS_FLOAT:
        return replace(shape, format="f32")
    chosen = _chosen(name, wanted, stored)
    kind, group, minimum = chosen
    if name in AT_LEAST_16_BITS and kind in QUANTISED:
        kind, group, minimum = "bf16", 0, False
    return replace(shape, format=kind, group=group, minimum=minimum)


def _chosen(name: str, wanted: Precision, stored: Sequence[Format]) -> Format:
    kinds = {kind for kind, _, _ in stored}
    kept = {"int4": _KEPT_AS_4_BITS, "int8": _KEPT_AS_8_BITS}.get(wanted.dtype or "", frozenset())
    if wanted.dtype is None or kinds <= kept:
        return _merged(stored)
    if wanted.dtype in _FLOATS:
        return _FLOATS[wanted.dtype]
    if wanted.dtype == "int8" or name in ("embed", "layer_embed", "head"):
        return _EIGHT
    return ("i4", wanted.group, wanted.asymmetric)
