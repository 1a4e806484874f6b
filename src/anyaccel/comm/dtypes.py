# SPDX-License-Identifier: Apache-2.0
"""Which dtypes native code moves and reduces, and how the others are brought to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from anyaccel.errors import UsageError

# In the order of csrc/comm/reduce_dispatch.cpp; those that this torch does not have are left out.
_NAMES = (
    *("float32", "bfloat16", "float16", "float64", "int8", "int16", "int32", "int64", "uint8"),
    *("bool", "complex32", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
CODES: dict[torch.dtype, int] = {getattr(torch, name): code for code, name in enumerate(_NAMES) if hasattr(torch, name)}
_REDUCED = 9  # native kernels reduce the first nine of _NAMES

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
OP_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_BITWISE = (BAND, BOR, BXOR)
# The reduction of bytes 0 and 1 that is the same as the reduction of booleans.
_BOOL_OPS = {SUM: MAX, PRODUCT: MIN, MIN: MIN, MAX: MAX, BAND: BAND, BOR: BOR, BXOR: BXOR}
_SIGNED = {
    getattr(torch, name): signed
    for name, signed in (("uint16", torch.int16), ("uint32", torch.int32), ("uint64", torch.int64))
    if hasattr(torch, name)
}
_SMALLEST = -(2**63)


def code_of(dtype: torch.dtype) -> int:
    """The code by which native code names a dtype.

    Raises:
        UsageError: a dtype that torch has got since.
    """
    try:
        return CODES[dtype]
    except KeyError:
        raise UsageError(f"backend shm does not know {dtype}; view it as an integer type of its size") from None


def op_code(op: ReduceOp | ReduceOp.RedOpType) -> int:
    """The code of a reduction, which is torch's own number.

    Raises:
        UsageError: PREMUL_SUM, or something that torch has got since.
    """
    kind: Any = getattr(op, "op", op)  # isinstance() takes each for the other
    number = int(kind)
    if not 0 <= number < len(OP_NAMES):
        raise UsageError(f"backend shm has no {kind}; it has {', '.join(OP_NAMES)}")
    return number


@dataclass(frozen=True)
class Lowered:
    """A dense tensor as a kernel takes it.

    Attributes:
        tensor: its values; shares memory with the original where `raised` is None.
        code, op: dtype and reduction for native code. `op` is None where there is no kernel: `combine` reduces two.
        raised: gives the original dtype back.
        told: the code of the original dtype where it is another one, which peers are to have too; else 0.
    """

    tensor: torch.Tensor
    code: int
    op: int | None
    raised: Callable[[torch.Tensor], torch.Tensor] | None = None
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    told: int = 0


def _no_such(op: int, dtype: torch.dtype) -> UsageError:
    return UsageError(f"there is no reduction {OP_NAMES[op]} of {str(dtype).removeprefix('torch.')}")


def lower(dense: torch.Tensor, op: int) -> Lowered:
    """What to reduce in place of `dense`.

    float8 is summed in fp32 and rounded once, truth values by "or" (SUM, MAX) and "and" (PRODUCT, MIN).

    Raises:
        UsageError: the reduction means nothing for the dtype.
    """
    dtype = dense.dtype
    code = code_of(dtype)
    if code < _REDUCED:
        if op in _BITWISE and dtype.is_floating_point:
            raise _no_such(op, dtype)
        return Lowered(dense, code, op)
    if dtype == torch.bool:
        if op not in _BOOL_OPS:
            raise _no_such(op, dtype)
        return Lowered(dense.view(torch.uint8), CODES[torch.uint8], _BOOL_OPS[op], told=code)
    if dtype.is_complex:
        if op in (SUM, AVG):
            real = torch.view_as_real(dense)
            return Lowered(real, CODES[real.dtype], op, told=code)
        if op == PRODUCT:
            return Lowered(dense, code, None, combine=torch.mul)
        raise _no_such(op, dtype)
    if dtype in _SIGNED:
        if op in (SUM, PRODUCT, *_BITWISE):
            signed = dense.view(_SIGNED[dtype])
            return Lowered(signed, CODES[signed.dtype], op, told=code)
        if dtype == torch.uint64:
            if op == AVG:
                raise _no_such(op, dtype)
            # The same order in signed numbers.
            moved = dense.view(torch.int64) ^ _SMALLEST
            return Lowered(moved, CODES[torch.int64], op, lambda t: (t ^ _SMALLEST).view(torch.uint64), told=code)
        return Lowered(dense.to(torch.int64), CODES[torch.int64], op, lambda t: t.to(dtype), told=code)
    if dtype.is_floating_point and dtype.itemsize == 1 and op not in _BITWISE:
        return Lowered(dense.float(), CODES[torch.float32], op, lambda t: t.to(dtype), told=code)
    raise _no_such(op, dtype)
